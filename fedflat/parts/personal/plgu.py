"""PLGU: personalised models from layer-wise generalised updates (paper 002)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedflat.flat import FlatModel
from fedflat.groups import Group, layer_groups
from fedflat.method import Evaluate, Fit, Local, State
from fedflat.parts.personal.layerwise import LayerWise, TwinTrajectories
from fedflat.parts.personal.split import head_mask, head_tensors

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class PLGULF(TwinTrajectories):
    """PLGU with layer freezing: a client's D most personal layers start the round where it left them.

    The others start at the model received, w. Both trajectories are those of `TwinTrajectories`; θ stays with the
    client, the change of w is sent.

    layers: D. freeze: do not train those layers of θ this round. The other fields are explained in `LayerWise` and
    `TwinTrajectories`. Client keeps θ_i (1); sends 1 down, 1 up; two gradients a step.
    The paper prints Σξ = 1 but divides by d_l only, so ξ is normalised here; with score="mean", which its remarks fit
    better, equal scores give SAM. Clients weigh the same, as in the paper.
    """

    name: ClassVar[str] = "plgu_lf"
    formula: ClassVar[str] = (
        "ξ_l ∝ ‖θ_i,l − w_l‖ / d_l^κ;  θ = θ_i in the D layers of the largest ξ, w elsewhere\n"
        "each step: g = ∇F_B(θ),  θ ← θ − η_l g,  ε_l = ρ ξ_l g_l / ‖g‖,  w_k ← w_k − η_l ∇F_B(w_k + ε)\n"
        "afterwards θ_i ← θ;  server: w ← w + η_g mean_S Δ_i"
    )
    uniform: ClassVar[bool] = True
    layers: int = 5
    freeze: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.layers >= 0, f"layers must not be negative, got {self.layers}")

    def check(self, task: Task) -> None:
        """Refuse more personal layers than there are."""
        count = len(layer_groups(task.model, self.granularity))
        self.require(self.layers <= count, f"layers={self.layers}, but the model has {count} such layers")

    def begin(self, local: Local) -> None:
        """Scores, and where θ starts."""
        state, groups = local.state(self), self.groups(local)
        scores = self.scores(groups, state.get("theta", local.origin), local.origin)
        largest = torch.sort(scores, descending=True, stable=True).indices[: self.layers].tolist()
        own, buffers = local.origin.clone(), local.model.buffers.clone()
        kept = [groups[i] for i in largest]
        if state:
            take(kept, own, state["theta"])
            take_buffers(kept, local.model, buffers, state["buffers"])
        trains = self.spread(kept, torch.ones(len(kept)), own) == 0 if self.freeze else None
        self.start(local, own, buffers, scores, trains)

    def end(self, local: Local) -> None:
        """Keep θ."""
        scratch = local.scratch(self)
        local.state(self).update(theta=scratch["own"], buffers=scratch["buffers"])

    def personal(self, state: State, theta: Tensor) -> State | None:
        """θ_i."""
        return state or None


def take(groups: Iterable[Group], into: Tensor, source: Tensor) -> None:
    """Copy the weights of some layers."""
    for group in groups:
        for span in group.spans:
            into[span.start : span.stop] = source[span.start : span.stop]


def take_buffers(groups: Iterable[Group], model: FlatModel, into: Tensor, source: Tensor) -> None:
    """Copy the statistics of some layers."""
    owners = {owner for group in groups for owner in group.owners}
    for span in model.buffer_spans:
        if span.name.rpartition(".")[0] in owners:
            into[span.start : span.stop] = source[span.start : span.stop]


@dataclass(frozen=True)
class PLGUGRep(LayerWise):
    """PLGU on a common representation: heads stay with the clients, the body takes generalised steps.

    A round is `local_epochs` on the head alone, then two steps of the body φ on each minibatch.

    body_epochs: passes for the body. body_steps: minibatches instead (1 is the paper's algorithm to the letter).
    score_source: "step" compares with the body received, φᵗ; "previous" with the body last sent by this client.
    reuse_grad: make ε of the first gradient, which saves one of the three. Other fields: see `LayerWise`.
    Client keeps its head (and its last body for "previous"); sends the body down, the body up.
    The printed order of the equations needs φ' before it is made, and averages φ; this averages the generalised body.
    """

    name: ClassVar[str] = "plgu_grep"
    formula: ClassVar[str] = (
        "head: h_i ← h_i − η_l ∇F_B(h_i);  then body: φ' = φ − η_l ∇F_B(φ),  φ ← φ' − η_l ∇F_B(φ' + ε)\n"
        "ε_l = ρ ξ_l g_l / ‖g‖,  g = ∇F_B(φ'),  ξ_l ∝ ‖φ'_l − φᵗ_l‖ / d_l^κ\n"
        "server: the mean of the bodies"
    )
    splits: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    body_epochs: int = 1
    body_steps: int | None = None
    score_source: str = "step"
    reuse_grad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.body_epochs >= 0, f"body_epochs must not be negative, got {self.body_epochs}")
        steps = self.body_steps
        self.require(steps is None or steps >= 0, f"body_steps must not be negative, got {steps}")
        known = ("step", "previous")
        self.require(self.score_source in known, f"score_source is 'step' or 'previous', not {self.score_source!r}")

    def private(self, model: FlatModel) -> Iterable[str]:
        """The head."""
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        """Head, then body."""
        head = head_mask(local, self)
        fit(only=head, branch="head")
        fit(epochs=self.body_epochs, steps=self.body_steps, only=1 - head)

    def gradient(self, local: Local, evaluate: Evaluate) -> None:
        """One plain step of the body, then the gradient at the perturbed point."""
        evaluate()
        if local.branch != "global":
            return
        plain = local.grad.clone()
        local.descend(local.theta, local.grad, local.velocity)
        if self.reuse_grad:
            local.grad.copy_(plain)
        else:
            evaluate()
        groups = self._body(local)
        scores = self.scores(groups, local.theta, local.state(self).get("previous", local.origin))
        with local.displaced(by=self.perturbation(local.grad, self.spread(groups, scores, local.grad))):
            evaluate()

    def _body(self, local: Local) -> list[Group]:
        head = head_mask(local, self)
        return [group for group in self.groups(local) if not head[group.spans[0].start]]

    def end(self, local: Local) -> None:
        """Keep the body that is sent, where the scores need it."""
        if self.score_source == "previous":
            local.state(self)["previous"] = local.theta.clone()

    def adapt(self, local: Local, fit: Fit) -> None:
        """The head alone."""
        fit(only=head_mask(local, self), branch="adapt")
