"""PLGU: personalised models from layer-wise generalised updates (Qu et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core.fields import Natural
from fedflat.core.flat import FlatModel, names_within
from fedflat.core.groups import Group, layer_groups
from fedflat.core.part import Backward, Fit
from fedflat.core.tensors import State
from fedflat.core.views import Local, SetupView
from fedflat.parts.personal.layerwise import LayerWise, TwinTrajectories
from fedflat.parts.personal.split import head_mask, head_tensors


@dataclass(frozen=True)
class PLGULF(TwinTrajectories):
    """PLGU with layer freezing: a client's D most personal layers start the round where it left them.

    The other layers start at the received model w. Both trajectories are those of `TwinTrajectories`; θ stays with the
    client, the change of w is sent. The client keeps θ_i (1); sends 1 down, 1 up; two gradients per step.
    The paper prints Σξ = 1 but divides by d_l only, so ξ is normalised here; with score="mean", which fits its remarks
    better, equal scores give SAM. Clients have equal weights, as in the paper.

    Args:
        layers: D, the number of personal layers.
        freeze: Do not train those layers of θ this round.
        rho, score, score_dim_power, granularity, p: See `LayerWise`.
        perturb_at, ascent_grad: See `TwinTrajectories`.
    """

    name: ClassVar[str] = "plgu_lf"
    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "ξ_l ∝ ‖θ_i,l − w_l‖ / d_l^κ;  θ = θ_i in the D layers of the largest ξ, w elsewhere\n"
        "each step: g = ∇F_B(θ),  θ ← θ − η_l g,  ε_l = ρ ξ_l g_l / ‖g‖,  w_k ← w_k − η_l ∇F_B(w_k + ε)\n"
        "afterwards θ_i ← θ;  server: w ← w + η_g mean_S Δ_i"
    )
    uniform: ClassVar[bool] = True
    layers: Natural = 5
    freeze: bool = False

    def check(self, setup: SetupView) -> None:
        count = len(layer_groups(setup.model, self.granularity))
        self.require(self.layers <= count, f"layers={self.layers}, but the model has {count} such layers")

    def begin(self, local: Local) -> None:
        state, groups = local.state(self), self.groups(local)
        scores = self.scores(groups, state.get("theta", local.given), local.given)
        largest = torch.sort(scores, descending=True, stable=True).indices[: self.layers].tolist()
        own, buffers = local.given.clone(), local.model.buffers.clone()
        kept = [groups[i] for i in largest]
        if state:
            take(kept, own, state["theta"])
            take_buffers(kept, local.model, buffers, state["buffers"])
        trains = self.spread(kept, own.new_ones(len(kept)), own) == 0 if self.freeze else None
        self.start(local, own, buffers, scores, trains)

    def end(self, local: Local) -> None:
        scratch = local.scratch(self)
        local.state(self).update(theta=scratch["own"], buffers=scratch["buffers"])

    def personal(self, state: State, theta: Tensor) -> State | None:
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

    A round is E_h epochs on the head alone, then E_b on the body φ with two steps on each minibatch. With rho=0 and
    generalise=False it is FedRep with equal weights of the clients.
    The client keeps its head (and its last body for "previous"); sends the body down, the body up.
    The printed order of the equations needs φ' before it is made, and averages φ; this averages the generalised body.

    Args:
        head_epochs: E_h, the epochs on the head per round; None is `local_epochs`, the paper's K.
        body_epochs: E_b, the epochs on the body per round; None is `local_epochs`.
        body_steps: The number of minibatches for the body instead (1 is exactly the paper's algorithm).
        generalise: Take the second, generalised step of the body on each minibatch.
        score_source: "step" compares with the body received, φᵗ; "previous" with the body this client sent last.
        reuse_grad: Make ε from the first gradient, which saves one of the three.
        rho, score, score_dim_power, granularity, p: See `LayerWise`.
    """

    name: ClassVar[str] = "plgu_grep"
    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "head: h_i ← h_i − η_l ∇F_B(h_i);  then body: φ' = φ − η_l ∇F_B(φ),  φ ← φ' − η_l ∇F_B(φ' + ε)\n"
        "ε_l = ρ ξ_l g_l / ‖g‖,  g = ∇F_B(φ'),  ξ_l ∝ ‖φ'_l − φᵗ_l‖ / d_l^κ\n"
        "server: the mean of the bodies"
    )
    common_model: ClassVar[bool] = False
    uniform: ClassVar[bool] = True
    head_epochs: Natural | None = None
    body_epochs: Natural | None = 1
    body_steps: Natural | None = None
    score_source: Literal["step", "previous"] = "step"
    reuse_grad: bool = False
    generalise: bool = True

    def private(self, model: FlatModel) -> Iterable[str]:
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        head = head_mask(local, self)
        fit(epochs=self.head_epochs, only=head, branch="head")
        fit(epochs=self.body_epochs, steps=self.body_steps, only=1 - head)

    def gradient(self, local: Local, backward: Backward) -> None:
        backward()
        if local.branch != "global" or not self.generalise:
            return
        plain = local.grad.clone()
        local.descend(local.theta, local.grad, local.optimizer_state or {})
        if self.reuse_grad:
            local.grad.copy_(plain)
        else:
            backward()
        groups = self._body(local)
        scores = self.scores(groups, local.theta, local.state(self).get("previous", local.given))
        with local.displaced(by=self.perturbation(local.grad, self.spread(groups, scores, local.grad))):
            backward()

    def _body(self, local: Local) -> list[Group]:
        head = names_within(local.model.spans, local.model.require_head(self.name))
        return [group for group in self.groups(local) if group.spans[0].name not in head]

    def end(self, local: Local) -> None:
        if self.score_source == "previous":
            local.state(self)["previous"] = local.theta.clone()

    def adapt(self, local: Local, fit: Fit) -> None:
        fit(epochs=self.head_epochs, only=head_mask(local, self), branch="adapt")
