"""MOON (Li et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.fields import NonNegative, Positive
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local, SetupView
from fedflat.errors import InputError


@dataclass(frozen=True)
class Moon(Part):
    """Draw the features of a batch towards those of the received model, away from those of the last local model.

    z, z_g and z_p are the features under the current, the received and the last local model, s is the cosine
    similarity. Features are the head's input, or the output of the module that `features` names. The paper puts a
    projection before the head, e.g. model="resnet56(projection=256)".
    The client keeps its last local model (1); sends 1 down, 1 up; three forward passes per step.
    Differs from the paper in a client's first round: there the last local model is the received one, so that the term
    is constant (log 2) and left out. The two frozen passes run in evaluation mode.

    Args:
        mu: μ, the weight of the term; 0 is FedAvg.
        temperature: T.
    """

    formula: ClassVar[str] = "L ← L + μ mean −log( e^{s(z, z_g)/T} / (e^{s(z, z_g)/T} + e^{s(z, z_p)/T}) )"
    model_options: ClassVar[Mapping[str, Any]] = {"projection": 256}
    rank: ClassVar[int] = 5  # compares features of the augmented batch
    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    def check(self, setup: SetupView) -> None:
        with setup.model.capture_features(self.name):
            pass

    def around_forward(self, local: Local) -> AbstractContextManager[Any]:
        return local.model.capture_features(self.name)

    def begin(self, local: Local) -> None:
        local.scratch(self)["buffers"] = local.model.buffers.clone()  # those of the received model, for `batch`

    def batch(self, local: Local, batch: Batch) -> Batch:
        state, scratch = local.state(self), local.scratch(self)
        if self.mu > 0 and "previous" in state:
            scratch["received"] = features_at(local, local.given, scratch["buffers"], batch)
            scratch["previous"] = features_at(local, state["previous"], state["buffers"], batch)
        return batch

    def loss(self, local: Local, output: object) -> Tensor | None:
        scratch, z = local.scratch(self), local.features
        if "previous" not in scratch or z is None:
            return None
        z = z.flatten(1).to(local.theta.dtype)
        return self.mu * contrast(z, scratch["received"], scratch["previous"], self.temperature)

    def end(self, local: Local) -> None:
        local.state(self).update(previous=local.theta.clone(), buffers=local.model.buffers.clone())


@torch.no_grad()
def features_at(local: Local, theta: Tensor, buffers: Tensor, batch: Batch) -> Tensor:
    """Features of the batch at other weights, in evaluation mode; restores the model."""
    model = local.model
    model.module.eval()
    with model.loaded(theta, buffers), model.capture_features(Moon.name):
        model(batch.x)
    model.module.train()
    z = model.take_features()
    if z is None:
        raise InputError("moon: the forward pass does not go through the head; name it with head='…' or features='…'")
    return z.flatten(1).to(local.theta.dtype)


def contrast(z: Tensor, towards: Tensor, away: Tensor, temperature: float) -> Tensor:
    """Mean contrastive loss of rows z; log 2 where `towards` and `away` are the same."""
    scores = torch.stack([F.cosine_similarity(z, towards), F.cosine_similarity(z, away)], dim=1)
    return F.cross_entropy(scores / temperature, z.new_zeros(len(z), dtype=torch.int64))
