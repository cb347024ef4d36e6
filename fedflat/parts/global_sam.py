"""Perturbations that look at the global model: FedLESAM (Fan et al., 2024) and FedGF (Lee and Yoon, 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Count, NonNegative
from fedflat.core.part import Backward, Part
from fedflat.core.rows import norms, unit
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts.direction import ONE_MODEL, require_one_model
from fedflat.parts.requirements import LENGTH, differs


@dataclass(frozen=True)
class FedLESAM(Part):
    """SAM whose step uphill is the way back to an earlier global model, at the price of one gradient per step.

    ε is the same in all steps of a round, and zero where there is no earlier model.
    The client keeps w_old (1); sends 1 down, 1 up. With direction="last" the server keeps it; sends 2 down, 1 up.
    Differs from the authors' code, which shifts every tensor by one scalar; see the page.

    Args:
        rho: ρ, the radius; 0 is FedAvg.
        direction: w_old is the model that this client received when it last took part ("own", the paper's), or the one
            that was sent in the last round ("last", the code's).
    """

    formula: ClassVar[str] = "ε = ρ unit(w_old − w),  g ← ∇L(w_k + ε),  afterwards w_old ← w"
    stacks: ClassVar[bool] = True
    global_gradient: ClassVar[bool] = True
    rho: NonNegative = 0.01
    direction: Literal["own", "last"] = "own"

    def check(self, setup: SetupView) -> None:
        if self.direction == "last":
            require_one_model(setup, self)

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        if self.direction == "own":
            return {}
        return {"back": server.state(self).get("old", server.origin) - server.origin}

    def begin(self, local: Local) -> None:
        old = local.state(self).get("old")
        back = local.received(self).get("back", None if old is None else old - local.given)
        if back is not None and self.rho > 0:
            local.scratch(self)["ascent"] = self.rho * unit(local.exchanged(back))

    def gradient(self, local: Local, backward: Backward) -> None:
        ascent = local.scratch(self).get("ascent")
        if ascent is None:
            backward()
            return
        with local.displaced(by=ascent, track_buffers=True):
            backward()

    def end(self, local: Local) -> None:
        if self.direction == "own":
            local.state(self)["old"] = local.given.clone()

    def end_round(self, server: Server) -> None:
        if self.direction == "last":
            server.state(self)["old"] = server.origin.clone()


@dataclass(frozen=True)
class FedGF(Part):
    """Seek flatness of the global model where clients diverge, and of their own models where they do not.

    c is the share of the last `window` rounds (of as many as there are) with D = mean_S ‖Δ_i‖ above the threshold. At
    c = 1 all steps take gradients at p. D and c are recorded as `fedgf_distance` and `fedgf_c`.
    The server keeps w_last (1) and the window; sends 2 down, 1 up and a number each way; two gradients per step.
    Differs from the authors' code in nothing known; it names no threshold.

    Args:
        rho: ρ, the radius around the local model.
        rho_g: ρ_g, the radius around the global model; None is ρ.
        threshold: T_D; None is infinite, which is SAM.
        window: W.
    """

    formula: ClassVar[str] = (
        "p = w + ρ_g unit(w_last − w),  g ← ∇L(c p + (1 − c) (w_k + ρ g/‖g‖))\n"
        "server: w ← w + η_g Δ̄,  c ← mean of the last W values of [mean_S ‖Δ_i‖ > T_D]"
    )
    global_gradient: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (LENGTH,)
    alone_in: ClassVar[Mapping[str, str]] = ONE_MODEL
    rho: NonNegative = 0.05
    rho_g: NonNegative | None = None
    threshold: NonNegative | None = 0.2
    window: Count = 30

    def _mixture(self, server: Server) -> Tensor:
        """c, zero before the first round."""
        window = server.state(self).get("window")
        return torch.zeros(1, dtype=torch.float64) if window is None else window[window >= 0].mean().reshape(1)

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        radius, last = self.rho if self.rho_g is None else self.rho_g, server.state(self).get("last", server.origin)
        return {"p": server.origin.add(unit(last - server.origin), alpha=radius), "c": self._mixture(server)}

    def begin(self, local: Local) -> None:
        local.scratch(self)["c"] = float(local.received(self)["c"])

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        c = local.scratch(self)["c"]
        if self.rho == 0 and c == 0:
            return
        ascent = self.rho * unit(local.grad)
        if c > 0:
            ascent.mul_(1 - c).add_(local.exchanged(local.received(self)["p"] - local.theta), alpha=c)
        with local.displaced(by=ascent):
            backward()

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        local.send(self, norm=norms(delta.double()))
        return delta

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        return differs(update, self.name, "norm", float(norms(update.delta.double())))

    def end_round(self, server: Server) -> None:
        state = server.state(self)
        above = torch.zeros(1, dtype=torch.float64)
        if self.threshold is not None:
            above.copy_(self._distance(server) > self.threshold)
        unknown = torch.full((self.window,), -1.0, dtype=torch.float64)
        state["window"] = torch.cat([state.get("window", unknown)[1:], above])
        state["last"] = server.origin.clone()

    def _distance(self, server: Server) -> Tensor:
        """D."""
        return server.total(self)["norm"] / server.participants

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        if not rows:
            return {}
        return {"fedgf_distance": float(self._distance(server)), "fedgf_c": float(self._mixture(server))}
