"""What the drift-correcting methods share: the sum of a client's past updates, and control variates."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fedflat.core.part import Part
from fedflat.core.rows import Number, add_
from fedflat.core.views import Local, Server, SetupView

log = logging.getLogger(__name__)
CONTROL = "the correction by control variates, and two of them would undo each other"
"""What parts claim that add c − c_i to the gradient and refresh c_i by the direction that was applied."""


def warn_of_momentum(setup: SetupView, part: Part, remedy: str) -> None:
    """Say that c_i, which is made of the update, counts a gradient more than once if the optimiser has momentum."""
    momentum = setup.experiment.momentum
    if momentum >= 0.5:
        log.warning(
            "%s: with momentum=%g an update is up to %.3g times the sum of its gradients, and c_i grows with it, which "
            "can diverge; %s allows for it",
            *(part.name, momentum, 1 / (1 - momentum), remedy),
        )


def check_split(setup: SetupView, part: Part, clip_split: bool) -> None:
    """Raise an error if `clip_split` would let weights that stay with the clients decay, where no pull counters it."""
    whole = len(setup.private.theta) == 0
    part.require(
        whole or not clip_split, "clip_split is for models of which no weights stay with clients: leave it out"
    )


def begin_pull(local: Local, part: Part, alpha: float, clip_split: bool) -> None:
    """Prepare the pull of strength α_i = α/ω_i towards w − H_i; for `clip_split` see `FedDyn`."""
    strength = alpha / local.share
    local.scratch(part)["strength"] = strength
    if clip_split:
        local.sent_decay = local.sent_decay + strength


def add_pull(local: Local, part: Part, clip_split: bool) -> None:
    """g ← g + α_i (w_k − w + H_i)."""
    pull = -local.origin if clip_split else local.theta - local.origin
    past = local.state(part).get("h")
    add_(local.grad, pull if past is None else pull.add_(past), local.scratch(part)["strength"])


def remember_drift(local: Local, part: Part) -> None:
    """H_i ← H_i + Δ_i."""
    state, delta = local.state(part), local.theta - local.origin
    state["h"] = state["h"] + delta if "h" in state else delta


def step_with_drift(server: Server, part: Part, delta: Tensor) -> None:
    """H̄ ← H̄ + (1/N) Σ_S Δ_i,  w ← mean_S y_i + H̄, where H̄ is the mean of H_i over all clients."""
    state = server.state(part)
    change = delta * (server.participants / server.clients)
    state["h"] = state["h"] + change if "h" in state else change
    server.theta = server.origin + delta + state["h"]


def control(state: dict[str, Tensor], like: Tensor) -> Tensor:
    """The control variate in `state`, zero at first."""
    return state["c"] if "c" in state else torch.zeros_like(like)


def refreshed_control(local: Local, own: Tensor, common: Tensor, weight: Number) -> Tensor:
    """c_i − c − Δ_i / (weight · lr): the mean direction that was applied; `own` if there was no step."""
    scale = weight * local.lr
    moved = bool((scale > 0).all()) if isinstance(scale, Tensor) else scale > 0  # all clients of a stack, or none
    return own - common - (local.theta - local.origin) / scale if moved else own


def step_weights(steps: int, momentum: float = 0.0, nesterov: bool = False, shrink: float = 0.0) -> float:
    """The number of times that a constant gradient is in the local update, in units of the learning rate.

    Args:
        shrink: lr · μ of a proximal pull.

    >>> step_weights(3)
    3.0
    >>> step_weights(2, momentum=0.5)
    2.5
    """
    total = velocity = 0.0
    for _ in range(steps):
        gradient = 1.0 - shrink * total
        velocity = momentum * velocity + gradient
        total += gradient + momentum * velocity if nesterov else velocity
    return total
