"""What methods share that follow the direction in which the whole federation moved in the last round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.core.part import Part
from fedflat.core.views import Server, SetupView
from fedflat.parts.requirements import require_sgd

MIXTURE = "the last word on the gradient, which they mix with the last direction"
"""What these methods claim: a second one would mix the mixture."""


def require_known_steps(setup: SetupView, part: Part) -> None:
    """Refuse what breaks the formula of m: another optimiser than sgd, and a K that depends on who joined in secret."""
    require_sgd(part.name, setup, "the last direction m")
    secret = any(other.hides_participation for other in setup.parts) and setup.experiment.local_steps is None
    part.require(not secret, "its K, the mean number of local steps, is not covered by dp: set local_steps")


def last_direction(server: Server, part: Part) -> Tensor:
    """m, zero at first."""
    return server.state(part).get("m", torch.zeros_like(server.theta))


def remember_direction(server: Server, part: Part) -> None:
    """m ← −mean_S Δ_i / (K η_l); with a learning rate that changes within a round, K η_l is the mean of Σ_k η_k."""
    scale = (server.experiment.local_steps or server.steps) * server.mean_rate * server.lr
    if scale > 0:
        server.state(part)["m"] = server.delta / -scale
