"""Differential privacy of clients: DP-FedAvg (McMahan et al., 2018)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedflat import accountant, streams
from fedflat.flat import bounded
from fedflat.method import Local, Part, Server, Update
from fedflat.participation import sampling
from fedflat.parts.evaluated import AllClients
from fedflat.statistics import batchnorms

if TYPE_CHECKING:
    from fedflat.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DP(Part):
    """Clip every update and add Gaussian noise to their sum, so that no client can be recognised in the model.

    clip: C, largest norm of an update; None leaves them alone. noise: z, in units of C; 0 adds none and promises
    nothing. delta: δ. The metrics of round t have `epsilon`, the ε of all models up to it together, where one client's
    updates may be zeros instead (for another client in its place, it is that of z/2). Clients clip, which protects the
    honest whatever others send; the server adds the noise and is trusted: secure aggregation is out of scope.
    Sampling counts as far as it is proved: bernoulli(q) as Poisson sampling redrawn when nobody joins, uniform(m) as
    sampling without replacement, `all` and participants of your own not at all; see `fedflat.accountant`.
    Only the models are covered: losses, norms and counts in the records are not, and whoever knows `seed` knows the
    noise. Refused are BatchNorm statistics that are averaged, and parts that send more than the update.
    Keeps nothing; sends 1 down, 1 up. Differs from the paper in its accountant, and in weights of 1 for every client.
    """

    formula: ClassVar[str] = (
        "Δ_i ← Δ_i min(1, C/‖Δ_i‖),  Δ̄ = (Σ_S Δ_i + N(0, z²C² I)) / m\n"
        "m = qN under bernoulli(q), else the number of clients asked"
    )
    uniform: ClassVar[bool] = True
    discreet: ClassVar[bool] = True
    rank: ClassVar[int] = 50  # clips what all others leave
    clip: float | None = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        self.require(self.clip is None or self.clip > 0, f"clip must be above 0, got {self.clip}")
        self.require(self.noise >= 0, f"noise must not be negative, got {self.noise}")
        self.require(0 < self.delta < 1, f"delta must be above 0 and below 1, got {self.delta}")
        self.require(self.clip is not None or self.noise == 0, "noise needs a clip: its size is a multiple of it")

    def check(self, task: Task) -> None:
        """Refuse what the noise does not cover."""
        if self.noise == 0:
            return
        self.require(task.uniform, "its noise is made for plain means: leave weighting at 'auto' or 'uniform'")
        for name, _ in batchnorms(task.model.module):
            shared = f"{name}.running_mean".removeprefix(".") not in task.private.names
            self.require(not shared, f"the statistics of {name} are averaged without noise: use batchnorm='local'")
        if not task.sampled:
            log.warning("dp: nothing is known of how participants= draws clients: epsilon counts no sampling")
        if isinstance(task.evaluator, AllClients):
            log.warning("dp: epsilon does not cover the weights of evaluated='all', which have no noise")

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        """Clip, and see to it that nothing else leaves the client."""
        others = sorted(local.sent.keys() - {AllClients.name})
        told = f"{', '.join(others)} sends what is neither clipped nor noised: leave it out, or set noise=0"
        self.require(self.noise == 0 or not others, told)
        return bounded(delta, self.clip)

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        """Their sum and the noise, over a number that does not depend on who joined."""
        heard: list[int] = []
        law, value = _law(server)
        number = value * server.clients if law == "bernoulli" else server.asked
        mean = super().combine(server, _noted(updates, heard)).mul_(len(heard) / number)
        if self.clip is None or self.noise == 0:
            return mean
        generator = streams.torch_stream(server.experiment.seed, self.name, server.round)
        draw = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        return mean.add_(draw.to(mean.dtype), alpha=self.noise * self.clip / number)

    def remark(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """The ε of all rounds so far."""
        if self.noise == 0:
            return {}
        return {"epsilon": accountant.epsilon(server.round * self.divergence(server), self.delta)}

    def divergence(self, server: Server) -> accountant.Array:
        """The Rényi divergence of one round, by what is known of the sampling."""
        law, value = _law(server)
        if law == "bernoulli":
            return accountant.bernoulli(self.noise, value, server.clients)
        if law == "uniform":
            return accountant.fixed_size(self.noise, value / server.clients)
        return accountant.gaussian(self.noise)


def _law(server: Server) -> tuple[str, float]:
    return sampling(server.experiment.participation) if server.sampled else ("unknown", 1)


def _noted(updates: Iterable[Update], heard: list[int]) -> Iterator[Update]:
    for update in updates:
        heard.append(update.client)
        yield update
