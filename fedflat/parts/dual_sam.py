"""FedDyn's pull with sharpness-aware gradients: FedSMOO (Sun et al., 2023) and FedGloSS (Caldarola et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Natural, NonNegative, Positive
from fedflat.core.part import Backward, Part
from fedflat.core.rows import norms, unit, unit_
from fedflat.core.samples import Samples
from fedflat.core.views import Local, Server, SetupView
from fedflat.parts.drift import add_pull, begin_pull, remember_drift, step_with_drift
from fedflat.parts.sam import SAM


@dataclass(frozen=True)
class FedSMOO(Part):
    """FedDyn's pull, and a perturbation whose dual variable makes it consistent across the clients.

    All vectors are zero at first. Nothing bounds μ_i: its norm is recorded as `fedsmoo_mu`.
    The client keeps H_i, μ_i (2), the server H̄, s (2); sends 2 down, 2 up; two gradients per step.
    Differs from the paper, as its code does, in u_i = μ_i on the server, and in dividing α by the relative size ω_i.

    Args:
        rho: ρ, the radius (the paper's r); at 0 the method is FedDyn.
        alpha: α, the strength of the pull (the paper's 1/β).
        server: "code" sends u_i = μ_i, "paper" sends u_i = μ_i − ŝ of the last step.
    """

    formula: ClassVar[str] = (
        "ŝ = ρ unit(∇L(w_k) − μ_i − s),  μ_i ← μ_i + ŝ − s,  g ← ∇L(w_k + ŝ) + α_i (w_k − w + H_i)\n"
        "afterwards H_i ← H_i + Δ_i,  α_i = α/ω_i\n"
        "server: H̄ ← H̄ + (1/N) Σ_S Δ_i,  w ← mean_S y_i + H̄,  s ← ρ unit(mean_S u_i)"
    )
    global_gradient: ClassVar[bool] = True  # μ_i belongs to the trajectory that is sent
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean of the local models plus the mean drift"
    rho: NonNegative = 0.1
    alpha: NonNegative = 0.1
    server: Literal["code", "paper"] = "code"

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"s": server.state(self).get("s", torch.zeros_like(server.theta))} if self.rho > 0 else {}

    def begin(self, local: Local) -> None:
        begin_pull(local, self, self.alpha, clip_split=False)
        dual = local.state(self).get("mu")
        local.scratch(self)["mu"] = torch.zeros_like(local.theta) if dual is None else dual.clone()

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if self.rho == 0:
            return
        dual, common = local.scratch(self)["mu"], local.received(self)["s"]
        ascent = unit_(torch.sub(local.grad, dual).sub_(common)).mul_(self.rho)
        dual.add_(ascent).sub_(common)
        local.scratch(self)["ascent"] = ascent
        with local.displaced(by=ascent):
            backward()

    def correct_gradient(self, local: Local) -> None:
        add_pull(local, self, clip_split=False)

    def end(self, local: Local) -> None:
        remember_drift(local, self)
        if self.rho > 0:
            scratch = local.scratch(self)
            dual = local.state(self)["mu"] = scratch["mu"]
            last = self.server == "paper" and "ascent" in scratch
            local.send(self, u=dual - scratch["ascent"] if last else dual.clone())

    def step(self, server: Server, delta: Tensor) -> None:
        step_with_drift(server, self, delta)
        if self.rho > 0:
            server.state(self)["s"] = self.rho * unit(server.total(self)["u"] / server.participants)

    def client_metrics(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        return {"fedsmoo_mu": float(norms(local.scratch(self)["mu"]))}

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        norms = [float(row["fedsmoo_mu"]) for row in rows if "fedsmoo_mu" in row]
        return {"fedsmoo_mu": sum(norms) / len(norms)} if norms else {}


@dataclass(frozen=True)
class FedGloSS(Part):
    """Take SAM's step uphill on the server, along the last pseudo-gradient d, so that clients start at the worst point.

    In the first `warmup` rounds T_s both radii are ρ₀ + (t/T_s) (ρ − ρ₀); one of 0 stays 0.
    The client keeps H_i (1), the server H̄, d (2) and sends w̃ instead of w; sends 1 down, 1 up; two gradients per step.
    Differs from the paper in dividing 1/β by the relative size ω_i, as FedDyn here does; equal sizes are the paper's.

    Args:
        rho: ρ, the radius on the server; at 0 the method is FedDyn with α = 1/β, with SAM of radius ρ_l.
        rho_l: ρ_l, the radius on the clients; 0 takes one gradient per step.
        beta: β, the inverse strength of the pull.
        server: "paper", or "code", which divides the change of H̄ by |S| once more.
        warmup: T_s.
        rho_0: ρ₀.
    """

    formula: ClassVar[str] = (
        "sent: w̃ = w + ρ unit(d);  g ← ∇L(w_k + ρ_l g/‖g‖) + (w_k − w̃ + H_i) / (β ω_i)\n"
        "afterwards H_i ← H_i + Δ_i,  Δ_i = y_i − w̃\n"
        "server: H̄ ← H̄ + (1/N) Σ_S Δ_i,  w ← w + mean_S Δ_i + H̄,  d ← −mean_S Δ_i"
    )
    stacks: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean update plus the mean drift"
    rho: NonNegative = 0.15
    rho_l: NonNegative = 0.15
    beta: Positive = 10.0
    server: Literal["paper", "code"] = "paper"
    warmup: Natural = 0
    rho_0: NonNegative = 0.001

    def _radius(self, target: float, round: int) -> float:
        t = round - 1
        return target if t >= self.warmup or target == 0 else self.rho_0 + t / self.warmup * (target - self.rho_0)

    def outgoing(self, server: Server) -> Tensor:
        radius, d = self._radius(self.rho, server.round), server.state(self).get("d")
        return server.theta if d is None or radius == 0 else server.theta.add(unit(d), alpha=radius)

    def begin(self, local: Local) -> None:
        begin_pull(local, self, 1 / self.beta, clip_split=False)

    def gradient(self, local: Local, backward: Backward) -> None:
        SAM(self._radius(self.rho_l, local.round)).gradient(local, backward)

    def correct_gradient(self, local: Local) -> None:
        add_pull(local, self, clip_split=False)

    def end(self, local: Local) -> None:
        remember_drift(local, self)

    def step(self, server: Server, delta: Tensor) -> None:
        state, heard = server.state(self), server.participants if self.server == "paper" else 1
        change = delta * (heard / server.clients)
        state["h"] = state["h"] + change if "h" in state else change
        state["d"] = -delta
        server.theta = server.theta + delta + state["h"]
