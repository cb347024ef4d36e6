"""FedDC (Gao et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import (
    CONTROL,
    add_pull,
    begin_pull,
    control,
    refreshed_control,
    remember_drift,
    step_with_drift,
)
from fedflat.parts.requirements import require_sgd


@dataclass(frozen=True)
class FedDC(Part):
    """Separate the local drift from the model and correct it: FedDyn's pull together with SCAFFOLD's correction.

    The client keeps H_i, c_i (2), the server H̄, c (2); sends 2 down, 2 up.
    Differs from the paper, as its code does, in the states (SCAFFOLD's option 2) and in taking two separate means.

    Args:
        alpha: α, the strength of the pull; a client of relative size ω_i uses α_i = α/ω_i.
    """

    formula: ClassVar[str] = (
        "g ← g + α_i (w_k − w + H_i) + c/ω_i − c_i,  α_i = α/ω_i\n"
        "afterwards H_i ← H_i + Δ_i,  c_i⁺ = c_i − c/ω_i − Δ_i / (K_i η_l)\n"
        "server: c ← c + (1/N) Σ_S ω_i (c_i⁺ − c_i),  w ← mean_S y_i + mean_all H_i"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean of the local models plus the mean drift"
    claims: ClassVar[tuple[str, ...]] = (CONTROL,)
    alpha: NonNegative = 0.01

    def check(self, setup: SetupView) -> None:
        require_sgd(self.name, setup, "the control variate c_i")

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"c": control(server.state(self), server.theta)}

    def begin(self, local: Local) -> None:
        begin_pull(local, self, self.alpha, clip_split=False)
        scratch = local.scratch(self)
        scratch["common"] = local.received(self)["c"] / local.share
        scratch["correction"] = scratch["common"] - control(local.state(self), local.theta)

    def correct_gradient(self, local: Local) -> None:
        add_pull(local, self, clip_split=False)
        local.grad.add_(local.scratch(self)["correction"])

    def end(self, local: Local) -> None:
        remember_drift(local, self)
        state = local.state(self)
        own = control(state, local.theta)
        fresh = refreshed_control(local, own, local.scratch(self)["common"], local.weighted_steps)
        local.send(self, c=(fresh - own) * local.share)
        state["c"] = fresh

    def step(self, server: Server, delta: Tensor) -> None:
        step_with_drift(server, self, delta)

    def end_round(self, server: Server) -> None:
        state = server.state(self)
        state["c"] = control(state, server.theta) + server.total(self)["c"] / server.clients
