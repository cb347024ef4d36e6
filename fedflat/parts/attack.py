"""Malicious clients, to try defences on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel
from fedflat.method import Batch, Local, Part

if TYPE_CHECKING:
    from fedflat.task import Task

KINDS = ("sign_flip", "noise", "label_flip")


@dataclass(frozen=True)
class Attack(Part):
    """Let some clients send other updates than the method wants.

    kind: "sign_flip" sends the update reversed, "noise" Gaussian noise instead of it, "label_flip" what is learnt from
    the last class in place of the first, the last but one for the second, … scale: factor of what is sent.
    clients: f, how many are malicious, spread evenly over the N: client i is if i·f mod N < f. 0 is no attack.
    It is the update that is attacked; the same clients' statistics and messages of other parts are honest.
    Keeps nothing; sends 1 down, 1 up. Acts after all other parts: an attacker does not clip.
    """

    formula: ClassVar[str] = "malicious clients send −s Δ_i,  s N(0, I),  or s Δ_i of labels C − 1 − y"
    rank: ClassVar[int] = 90
    kind: str = "sign_flip"
    clients: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of attack", self.kind, KINDS)
        self.require(self.clients >= 0, f"clients must not be negative, got {self.clients}")

    def check(self, task: Task) -> None:
        """Refuse more attackers than clients, and labels that cannot be flipped."""
        self.require(self.clients <= task.clients, f"clients={self.clients} are more than the {task.clients} there are")
        if self.kind == "label_flip":
            self._classes(task.model)
            _, labels = task.federation.samples(0).batch(torch.zeros(1, dtype=torch.int64))
            self.require(not labels.is_floating_point(), "label_flip flips classes, but the targets are numbers")

    def _classes(self, model: FlatModel) -> int:
        head = model.submodule(model.require_head(self.name))
        if not isinstance(head, nn.Linear):
            raise InputError(f"{self.name}: label_flip counts the outputs of a Linear head; name one with head='…'")
        return head.out_features

    def malicious(self, local: Local) -> bool:
        """Whether this client is one of them; those that never train are not."""
        return local.client < local.clients and local.client * self.clients % local.clients < self.clients

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Flip the labels."""
        if self.kind != "label_flip" or not self.malicious(local):
            return batch
        last = self._classes(local.model) - 1
        return Batch(batch.x, tuple((weight, torch.where(y < 0, y, last - y)) for weight, y in batch.targets))

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        """Send something else."""
        if not self.malicious(local):
            return delta
        if self.kind == "noise":
            delta = torch.from_numpy(local.numpy_stream(self.name).standard_normal(delta.numel())).to(delta.dtype)
        return delta * (-self.scale if self.kind == "sign_flip" else self.scale)
