"""MOON (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.errors import InputError
from fedflat.flat import FlatModel
from fedflat.method import Batch, Local, Part


@dataclass(frozen=True)
class Moon(Part):
    """Draw the features of a batch towards those of the model received, away from those of the last local model.

    mu: μ; 0 is FedAvg. temperature: T. The features z are the head's input, or the module that `features` names; z_g,
    z_p are those of the received and of the last local model, s is the cosine. The paper puts a projection before the
    head, e.g. model="resnet56(projection=256)".
    Client keeps its last local model (1); sends 1 down, 1 up; three forward passes a step.
    Differs from the paper in a client's first round: there the last local model is the received one, so that the
    term is constant (log 2) and left out. The two frozen passes run in evaluation mode.
    """

    formula: ClassVar[str] = "L ← L + μ mean −log( e^{s(z, z_g)/T} / (e^{s(z, z_g)/T} + e^{s(z, z_p)/T}) )"
    rank: ClassVar[int] = 5  # compares the features of the batch as augmented
    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")
        self.require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")

    def prepare(self, model: FlatModel) -> None:
        """Have the model keep its features."""
        model.capture_features(self.name)

    def begin(self, local: Local) -> None:
        """Remember the received buffers, with which the received model is evaluated."""
        local.scratch(self)["buffers"] = local.model.buffers.clone()

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Find the batch's features under the two frozen models."""
        state, scratch = local.state(self), local.scratch(self)
        if self.mu > 0 and "previous" in state:
            scratch["received"] = features_at(local, local.origin, scratch["buffers"], batch)
            scratch["previous"] = features_at(local, state["previous"], state["buffers"], batch)
        return batch

    def loss(self, local: Local, output: object) -> Tensor | None:
        """The contrastive term."""
        scratch, z = local.scratch(self), local.features
        if "previous" not in scratch or z is None:
            return None
        z = z.flatten(1).to(local.theta.dtype)
        return self.mu * contrast(z, scratch["received"], scratch["previous"], self.temperature)

    def end(self, local: Local) -> None:
        """Keep this local model for the next time."""
        local.state(self).update(previous=local.theta.clone(), buffers=local.model.buffers.clone())


@torch.no_grad()
def features_at(local: Local, theta: Tensor, buffers: Tensor, batch: Batch) -> Tensor:
    """Features of the batch at other weights, in evaluation mode; the model comes back as it was."""
    model = local.model
    model.module.eval()
    with model.loaded(theta, buffers):
        model(batch.x)
    model.module.train()
    z = model.take_features()
    if z is None:
        raise InputError("moon: the forward pass does not go through the head; name it with head='…' or features='…'")
    return z.flatten(1).to(local.theta.dtype)


def contrast(z: Tensor, towards: Tensor, away: Tensor, temperature: float) -> Tensor:
    """Mean contrastive loss of rows z; log 2 where `towards` and `away` are the same."""
    scores = torch.stack([F.cosine_similarity(z, towards), F.cosine_similarity(z, away)], dim=1)
    return F.cross_entropy(scores / temperature, torch.zeros(len(z), dtype=torch.int64))
