"""What methods share that follow the direction in which the whole federation moved in the last round."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fedflat.core.part import Part, fills
from fedflat.core.views import Server, SetupView
from fedflat.parts.requirements import require_sgd

log = logging.getLogger(__name__)
MIXTURE = "the last word on the gradient, which they mix with the last direction"
"""What these methods claim: a second one would mix the mixture."""
ONE_MODEL = {"generate": "the one follows the move of a model that all clients receive, which the other has not"}
"""What they refuse: weights of its own for every client."""


def require_known_steps(setup: SetupView, part: Part) -> None:
    """Refuse what breaks the formula of m: another optimiser than sgd, and a K that depends on who joined in secret."""
    require_sgd(part.name, setup, "the last direction m")
    secret = any(other.hides_participation for other in setup.parts) and setup.experiment.local_steps is None
    part.require(not secret, "its K, the mean number of local steps, is not covered by dp: set local_steps")


def require_one_model(setup: SetupView, part: Part) -> None:
    """Refuse what `ONE_MODEL` says, for a part of which only some forms need it."""
    others = [other.name for other in setup.parts if isinstance(other, Part) and fills(other, "generate")]
    part.require(not others, f"it cannot be combined with {', '.join(others)}: {ONE_MODEL['generate']}")


def warn_of_growth(setup: SetupView, part: Part, fresh: float) -> None:
    """Say that m, which is applied again with weight 1 − `fresh`, can grow without limit if there is momentum."""
    momentum = setup.experiment.momentum
    if momentum > fresh:  # an update is up to 1/(1 − momentum) times the sum of the directions that were applied
        log.warning(
            "%s: with momentum=%g an update is up to %.3g times the sum of its directions, of which %.3g is the last "
            "one again: it can grow in every round until the run diverges. Set momentum=0",
            *(part.name, momentum, 1 / (1 - momentum), 1 - fresh),
        )


def last_direction(server: Server, part: Part) -> Tensor:
    """m, zero at first."""
    return server.state(part).get("m", torch.zeros_like(server.theta))


def remember_direction(server: Server, part: Part) -> None:
    """m ← −mean_S Δ_i / (K η_l); with a learning rate that changes within a round, K η_l is the mean of Σ_k η_k."""
    scale = (server.experiment.local_steps or server.steps) * server.mean_rate * server.lr
    if scale > 0:
        server.state(part)["m"] = server.delta / -scale
