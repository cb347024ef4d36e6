"""What of BatchNorm stays with the client: the policies that `Experiment.batchnorm` names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedflat.core.batchnorm import batchnorms
from fedflat.core.flat import FlatModel, names_within
from fedflat.core.part import Part


@dataclass(frozen=True)
class LocalBatchNorm(Part):
    """FedBN (Li et al., 2021): whole BatchNorm layers, statistics and affine parameters, stay with the client.

    Sends 1 down, 1 up, less those layers. A client starts with the layers of the first model it receives.
    """

    def private(self, model: FlatModel) -> Iterable[str]:
        for layer, _ in batchnorms(model.module):
            yield from names_within((*model.spans, *model.buffer_spans, *model.counter_spans), layer)


@dataclass(frozen=True)
class SiLoBN(Part):
    """SiLoBN (Andreux et al., 2020): statistics stay with the client, affine parameters are shared.

    Sends 1 down, 1 up, without statistics. Layers are found by type, not by the letters "bn" in their name.
    """

    def private(self, model: FlatModel) -> Iterable[str]:
        for layer, _ in batchnorms(model.module):
            yield from names_within((*model.buffer_spans, *model.counter_spans), layer)


POLICIES: dict[str, tuple[Part, ...]] = {
    "local": (LocalBatchNorm(),),
    "silobn": (SiLoBN(),),
    "silobn_by_domain": (SiLoBN(),),  # the same training; `engine.domains` evaluates
}
