"""FedCONST: convex constraints on local updates (paper 004)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedflat.flat import FlatModel, Span
from fedflat.method import Local, Part

if TYPE_CHECKING:
    from fedflat.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Const(Part):
    """Keep every output channel's displacement free of a mean and orthogonal to the channel received.

    Π is the orthogonal projector onto {1, w_ch}^⊥ of each channel, applied after every step.

    center, orthogonal: the two constraints, for ablations (only orthogonal projects along the raw channel).
    mode: "linear" for Π, or "sphere": centre each channel and put it back on the sphere of radius √2.
    init: start from centred channels of norm √2, as the authors' code does for every method.
    Channels are rows of weights with two dimensions or more; fan-in below 3 is left free, as are biases and norms.
    Keeps nothing; sends 1 down, 1 up. Differs from the paper's Algorithm 1 in projecting the displacement after the
    whole step instead of the gradient before it, and along the centred channel: only so both constraints hold.
    """

    formula: ClassVar[str] = (
        "w_k ← w + Π(w_k − w),  Π(v) = v̄ − (⟨v̄, u⟩/⟨u, u⟩) u\n"
        "v̄ = v − mean(v),  u = w_ch − mean(w_ch),  channel by channel"
    )
    center: bool = True
    orthogonal: bool = True
    mode: str = "linear"
    init: bool = False

    def __post_init__(self) -> None:
        self.require(self.mode in ("linear", "sphere"), f"mode is 'linear' or 'sphere', not {self.mode!r}")

    def check(self, task: Task) -> None:
        """Say once which weights stay free."""
        model = task.model
        free = [s.name for s in model.spans if s.name.endswith("weight") and s not in constrained(model)]
        if free:
            log.warning("const: left free, having a fan-in below 3 or being a norm layer's: %s", ", ".join(free))
        self.require(bool(constrained(model)), "the model has no weight with a fan-in of 3 or more to constrain")

    def prepare(self, model: FlatModel) -> None:
        """Centre and scale the initial channels."""
        if self.init:
            for span in constrained(model):
                _to_sphere(span.channels(model.theta))

    def begin(self, local: Local) -> None:
        """Compute what the projections of this round share."""
        local.scratch(self)["rows"] = [self._direction(span, local.origin) for span in constrained(local.model)]

    def _direction(self, span: Span, origin: Tensor) -> tuple[Span, Tensor, Tensor]:
        u = span.channels(origin)
        if self.center:
            u = u - u.mean(1, keepdim=True)
        squared = u.square().sum(1, keepdim=True)
        return span, u, squared.masked_fill_(squared == 0, math.inf)

    def constrain(self, local: Local) -> None:
        """Project."""
        if self.mode == "linear" and not (self.center or self.orthogonal):
            return
        scratch: dict[str, Any] = local.scratch(self)
        for span, u, squared in scratch["rows"]:
            theta = span.channels(local.theta)
            if self.mode == "sphere":
                _to_sphere(theta)
                continue
            origin = span.channels(local.origin)
            self.project(theta.sub_(origin), u, squared).add_(origin)

    def project(self, v: Tensor, u: Tensor, squared: Tensor) -> Tensor:
        """Π of each row of v, in place, for directions u of squared lengths `squared`."""
        if self.center:
            v.sub_(v.mean(1, keepdim=True))
        if self.orthogonal:
            v.addcmul_((v * u).sum(1, keepdim=True).div_(squared), u, value=-1)
        return v


def constrained(model: FlatModel) -> list[Span]:
    """The weights whose channels are constrained."""
    return [s for s in model.spans if len(s.shape) >= 2 and (s.stop - s.start) // s.shape[0] >= 3]


def _to_sphere(rows: Tensor) -> None:
    rows.sub_(rows.mean(1, keepdim=True))
    rows.mul_(math.sqrt(2) / rows.norm(dim=1, keepdim=True).clamp_(min=1e-12))
