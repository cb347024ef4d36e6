"""FedCONST: convex constraints on local updates (Kim et al., 2025)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedflat.core.flat import FlatModel, Span
from fedflat.core.part import Part
from fedflat.core.rows import dots, norms
from fedflat.core.views import Local, SetupView

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Const(Part):
    """Keep every output channel's displacement at mean zero and orthogonal to the received channel.

    Π is the orthogonal projector onto {1, w_ch}^⊥ of each channel, applied after every step. Channels are the rows of
    weights with two or more dimensions; weights with a fan-in below 3, biases and norm layers are left free.
    Keeps nothing; sends 1 down, 1 up. Differs from the paper's Algorithm 1 in projecting the displacement after the
    whole step instead of the gradient before it, and along the centred channel: both constraints hold only this way.

    Args:
        center: Apply the first constraint (False for ablations).
        orthogonal: Apply the second constraint; without `center` it projects along the raw channel.
        mode: "linear" for Π, or "sphere" to centre each channel and put it back on the sphere of radius √2.
        init: Start from centred channels of norm √2, as the authors' code does for every method.
    """

    formula: ClassVar[str] = (
        "w_k ← w + Π(w_k − w),  Π(v) = v̄ − (⟨v̄, u⟩/⟨u, u⟩) u\n"
        "v̄ = v − mean(v),  u = w_ch − mean(w_ch),  channel by channel"
    )
    stacks: ClassVar[bool] = True
    center: bool = True
    orthogonal: bool = True
    mode: Literal["linear", "sphere"] = "linear"
    init: bool = False

    def check(self, setup: SetupView) -> None:
        model = setup.model
        free = [s.name for s in model.spans if s.name.endswith("weight") and s not in constrained(model)]
        if free:
            log.warning(
                "const: weights with a fan-in below 3 and those of norm layers are left free: %s", ", ".join(free)
            )
        self.require(bool(constrained(model)), "the model has no weight with a fan-in of 3 or more to constrain")

    def build(self, module: nn.Module) -> nn.Module:
        if self.init:
            for weight in module.parameters():
                if weight.requires_grad and _has_channels(tuple(weight.shape)):
                    _to_sphere(weight.data.view(len(weight), -1))
        return module

    def begin(self, local: Local) -> None:
        local.scratch(self)["rows"] = [self._direction(span, local.origin) for span in constrained(local.model)]

    def _direction(self, span: Span, origin: Tensor) -> tuple[Span, Tensor, Tensor]:
        u = span.channels(origin)
        if self.center:
            u = u - u.mean(-1, keepdim=True)
        squared = u.square().sum(-1, keepdim=True)
        return span, u, squared.masked_fill_(squared == 0, math.inf)

    def constrain_weights(self, local: Local) -> None:
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
            v.sub_(v.mean(-1, keepdim=True))
        if self.orthogonal:
            v.addcmul_(dots(v, u).div_(squared), u, value=-1)
        return v


def constrained(model: FlatModel) -> list[Span]:
    """The weights whose channels are constrained."""
    return [span for span in model.spans if _has_channels(span.shape)]


def _has_channels(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and math.prod(shape[1:]) >= 3


def _to_sphere(rows: Tensor) -> None:
    rows.sub_(rows.mean(-1, keepdim=True))
    rows.mul_(math.sqrt(2) / norms(rows).clamp_(min=1e-12))
