"""LWSAM: sharpness-aware gradients whose radius differs from layer to layer (PLGU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import NonNegative, Range
from fedflat.core.groups import Group, layer_groups
from fedflat.core.part import Backward, Part
from fedflat.core.rows import norms
from fedflat.core.views import Local


@dataclass(frozen=True)
class LayerWise(Part):
    """What all layer-wise parts have in common: the scores of the layers and the perturbation they scale.

    s_l = ‖θ_l − w_l‖ / d_l^κ,  ξ = s normalised,  ε_l = ρ ξ_l sign(g_l) |g_l|^{q−1} / (‖g‖_q^q)^{1/p},  1/p + 1/q = 1

    At p = 2 this is ε_l = ρ ξ_l g_l / ‖g‖, with the norm over all layers.

    Args:
        rho: ρ, the radius.
        score: How ξ is normalised: "sum" (Σξ = 1), "mean" (mean ξ = 1: equal scores are SAM) or "none".
        score_dim_power: κ; 1 favours small layers, 0.5 is neutral to their size.
        granularity: What a layer is: "weight" (with the normalisation it feeds), "module" or "tensor".
        p: The exponent of the norm.
    """

    rho: NonNegative = 0.05
    score: Literal["sum", "mean", "none"] = "sum"
    score_dim_power: float = 1.0
    granularity: Literal["weight", "module", "tensor"] = "weight"
    p: Annotated[float, Range(1, open_low=True)] = 2.0

    def groups(self, local: Local) -> list[Group]:
        """The layers."""
        scratch = local.scratch(self)
        if "groups" not in scratch:
            scratch["groups"] = layer_groups(local.model, self.granularity)
        groups: list[Group] = scratch["groups"]
        return groups

    def scores(self, groups: list[Group], theta: Tensor, w: Tensor) -> Tensor:
        """ξ, one number per layer in the last dimension; all equal where no layer differs."""
        raw = torch.cat([_norm(group, theta - w) / group.size**self.score_dim_power for group in groups], dim=-1)
        if self.score == "none":
            return raw
        total, count = raw.sum(dim=-1, keepdim=True), len(groups)
        share = torch.where(total > 0, raw / total, 1 / count)
        return share * count if self.score == "mean" else share

    def spread(self, groups: list[Group], scores: Tensor, like: Tensor) -> Tensor:
        """Λ: the score of every coordinate, 0 outside the groups."""
        out = torch.zeros_like(like)
        for group, score in zip(groups, torch.split(scores, 1, dim=-1), strict=True):
            for span in group.spans:
                out[..., span.start : span.stop] = score
        return out

    def perturbation(self, grad: Tensor, scale: Tensor) -> Tensor:
        """ε at the gradient `grad`, given Λ."""
        if self.p == 2:
            return (grad * scale).mul_(self.rho / (norms(grad) + 1e-12))
        q = self.p / (self.p - 1)
        power = grad.abs().pow(q).sum(-1, keepdim=True) ** (1 / self.p)
        return grad.sign().mul_(grad.abs().pow_(q - 1)).mul_(scale).mul_(self.rho / (power + 1e-12))


def _norm(group: Group, difference: Tensor) -> Tensor:
    parts = [difference[..., span.start : span.stop].square().sum(-1, keepdim=True) for span in group.spans]
    return torch.cat(parts, dim=-1).sum(-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class LWSAM(LayerWise):
    """Descend along the gradient taken at a bad point nearby, farther away in the layers that are more personal.

    ε is that of `LayerWise`, with θ_i the client's last local model and w the received one. This is PLGU's gradient
    rule with one trajectory; in a client's first round all scores are equal.
    The client keeps its last local model (1); sends 1 down, 1 up; two gradients per step.
    """

    stacks: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "ε_l = ρ ξ_l g_l / ‖g‖,  g ← ∇L(w_k + ε)\nξ_l ∝ ‖θ_i,l − w_l‖ / d_l^κ with θ_i the client's last y_i"
    )

    def begin(self, local: Local) -> None:
        groups = self.groups(local)
        previous = local.state(self).get("previous", local.given)
        scores = self.scores(groups, previous, local.given)
        local.scratch(self)["scale"] = self.spread(groups, scores, local.theta)

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if self.rho > 0:
            with local.displaced(by=self.perturbation(local.grad, local.scratch(self)["scale"])):
                backward()

    def end(self, local: Local) -> None:
        local.state(self)["previous"] = local.theta.clone()


@dataclass(frozen=True)
class TwinTrajectories(LayerWise):
    """Algorithm 1 of PLGU: the client's own model takes plain steps, the common one steps at perturbed points.

    On each minibatch: g = ∇F_B(θ),  θ ← θ − lr g,  ε from g,  w ← w − lr ∇F_B(w + ε).

    Args:
        perturb_at: "w" as above; "theta" takes the second gradient at θ + ε.
        ascent_grad: The gradient that makes ε: "theta" as above, or "w" (a third gradient).
    """

    perturb_at: Literal["w", "theta"] = "w"
    ascent_grad: Literal["w", "theta"] = "theta"

    def start(self, local: Local, own: Tensor, buffers: Tensor, scores: Tensor, trains: Tensor | None = None) -> None:
        """Prepare the round.

        Args:
            local: The client's round.
            own, buffers: The weights and buffers with which θ starts.
            scores: ξ, one number per layer.
            trains: A mask of the coordinates of θ that are trained; None trains all.
        """
        scale = self.spread(self.groups(local), scores, local.theta)
        optimizer = local.start_optimizer()
        local.scratch(self).update(own=own, buffers=buffers, scale=scale, optimizer=optimizer, trains=trains)

    def gradient(self, local: Local, backward: Backward) -> None:
        scratch, model = local.scratch(self), local.model
        own: Tensor = scratch["own"]
        if local.branch != "global":
            backward()
            return
        with model.loaded(own, scratch["buffers"]):
            backward()
            scratch["buffers"] = model.buffers.clone()
        plain = local.grad
        if self.ascent_grad == "w":
            plain = plain.clone()
            with local.displaced(by=torch.zeros_like(own)):
                backward()
        ascent = self.perturbation(local.grad, scratch["scale"])
        if self.perturb_at == "theta":
            ascent += own - local.theta
        before = None if scratch["trains"] is None else own.clone()
        local.descend(own, plain, scratch["optimizer"])
        if before is not None:
            torch.where(scratch["trains"], own, before, out=own)
        with local.displaced(by=ascent, track_buffers=True):
            backward()
