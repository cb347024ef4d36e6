"""LWSAM: sharpness-aware gradients whose radius differs from layer to layer (PLGU, paper 002)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.groups import GRANULARITIES, Group, layer_groups
from fedflat.method import Evaluate, Local, Part


@dataclass(frozen=True)
class LayerWise(Part):
    """What all layer-wise parts have in common: the scores of the layers and the perturbation they scale.

    s_l = ‖θ_l − w_l‖ / d_l^κ,  ξ = s normalised,  ε_l = ρ ξ_l sign(g_l) |g_l|^{q−1} / (‖g‖_q^q)^{1/p},  1/p + 1/q = 1

    At p = 2 this is ε_l = ρ ξ_l g_l / ‖g‖, the norm over all layers.

    rho: ρ. score: how ξ is normalised, "sum" (Σξ = 1), "mean" (mean ξ = 1: equal scores are SAM) or "none".
    score_dim_power: κ; 1 favours small layers, 0.5 does not look at sizes. granularity: what a layer is, "weight" (with
    the normalisation it feeds), "module" or "tensor". p: of the norm.
    """

    rho: float = 0.05
    score: str = "sum"
    score_dim_power: float = 1.0
    granularity: str = "weight"
    p: float = 2.0

    def __post_init__(self) -> None:
        self.require(self.rho >= 0, f"rho must not be negative, got {self.rho}")
        self.require(self.score in ("sum", "mean", "none"), f"score is 'sum', 'mean' or 'none', not {self.score!r}")
        self.require(
            self.granularity in GRANULARITIES,
            f"granularity is {' or '.join(map(repr, GRANULARITIES))}, not {self.granularity!r}",
        )
        self.require(self.p > 1, f"p must be above 1, got {self.p}")

    def groups(self, local: Local) -> list[Group]:
        """The layers."""
        scratch = local.scratch(self)
        if "groups" not in scratch:
            scratch["groups"] = layer_groups(local.model, self.granularity)
        groups: list[Group] = scratch["groups"]
        return groups

    def scores(self, groups: list[Group], theta: Tensor, w: Tensor) -> Tensor:
        """ξ, one number a layer; equal ones where no layer differs."""
        raw = torch.stack([_norm(group, theta - w) / group.size**self.score_dim_power for group in groups])
        if self.score == "none":
            return raw
        total, count = raw.sum(), len(groups)
        share = raw / total if total > 0 else torch.full_like(raw, 1 / count)
        return share * count if self.score == "mean" else share

    def spread(self, groups: list[Group], scores: Tensor, like: Tensor) -> Tensor:
        """Λ: every coordinate's score, 0 outside the groups."""
        out = torch.zeros_like(like)
        for group, score in zip(groups, scores.tolist(), strict=True):
            for span in group.spans:
                out[span.start : span.stop] = score
        return out

    def perturbation(self, grad: Tensor, scale: Tensor) -> Tensor:
        """ε at the gradient `grad`, given Λ."""
        if self.p == 2:
            return (grad * scale).mul_(self.rho / (grad.norm().item() + 1e-12))
        q = self.p / (self.p - 1)
        power = float(grad.abs().pow(q).sum()) ** (1 / self.p)
        return grad.sign().mul_(grad.abs().pow_(q - 1)).mul_(scale).mul_(self.rho / (power + 1e-12))


def _norm(group: Group, difference: Tensor) -> Tensor:
    return torch.stack([difference[span.start : span.stop].square().sum() for span in group.spans]).sum().sqrt()


@dataclass(frozen=True)
class LWSAM(LayerWise):
    """Descend along the gradient taken at a bad point nearby, farther away in the layers that are more personal.

    ε is that of `LayerWise`, with θ_i the client's last local model and w the one received.

    Client keeps its last local model (1); sends 1 down, 1 up; two gradients a step. Alone this is the gradient rule of
    PLGU with one trajectory; in a client's first round all scores are equal.
    """

    formula: ClassVar[str] = (
        "ε_l = ρ ξ_l g_l / ‖g‖,  g ← ∇L(w_k + ε)\nξ_l ∝ ‖θ_i,l − w_l‖ / d_l^κ with θ_i the client's last y_i"
    )

    def begin(self, local: Local) -> None:
        """The scores of the round."""
        groups = self.groups(local)
        previous = local.state(self).get("previous", local.origin)
        scores = self.scores(groups, previous, local.origin)
        local.scratch(self)["scale"] = self.spread(groups, scores, local.theta)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """Ascend, evaluate, come back."""
        evaluate()
        if self.rho > 0:
            with local.displaced(by=self.perturbation(local.grad, local.scratch(self)["scale"])):
                evaluate()

    def end(self, local: Local) -> None:
        """Keep the local model."""
        local.state(self)["previous"] = local.theta.clone()


@dataclass(frozen=True)
class TwinTrajectories(LayerWise):
    """Algorithm 1 of paper 002: the client's own model descends plainly, the common one at perturbed points.

    On each minibatch: g = ∇F_B(θ),  θ ← θ − lr g,  ε from g,  w ← w − lr ∇F_B(w + ε).

    perturb_at: "w" as above; "theta" takes the second gradient at θ + ε. ascent_grad: whose gradient makes ε, "theta"
    as above, or "w" (a third gradient).
    """

    perturb_at: str = "w"
    ascent_grad: str = "theta"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.perturb_at in ("w", "theta"), f"perturb_at is 'w' or 'theta', not {self.perturb_at!r}")
        self.require(self.ascent_grad in ("w", "theta"), f"ascent_grad is 'w' or 'theta', not {self.ascent_grad!r}")

    def start(self, local: Local, own: Tensor, buffers: Tensor, scores: Tensor, trains: Tensor | None = None) -> None:
        """Prepare the round. own, buffers: θ⁰. trains: mask of what of θ is trained."""
        scale = self.spread(self.groups(local), scores, local.theta)
        velocity = local.fresh_velocity()
        local.scratch(self).update(own=own, buffers=buffers, scale=scale, velocity=velocity, trains=trains)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """One step of θ; the gradient for w."""
        scratch, model = local.scratch(self), local.model
        own: Tensor = scratch["own"]
        if local.branch != "global":
            evaluate()
            return
        with model.loaded(own, scratch["buffers"]):
            evaluate()
            scratch["buffers"] = model.buffers.clone()
        plain = local.grad
        if self.ascent_grad == "w":
            plain = plain.clone()
            with local.displaced(by=torch.zeros_like(own)):
                evaluate()
        ascent = self.perturbation(local.grad, scratch["scale"])
        if self.perturb_at == "theta":
            ascent += own - local.theta
        before = None if scratch["trains"] is None else own.clone()
        local.descend(own, plain, scratch["velocity"])
        if before is not None:
            torch.where(scratch["trains"], own, before, out=own)
        with local.displaced(by=ascent, track_buffers=True):
            evaluate()
