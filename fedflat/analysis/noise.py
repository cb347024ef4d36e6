"""Robustness of a model against noise on its weights (FedCONST paper, fig. 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.directions import gaussian
from fedflat.analysis.drawing import BLUE, dress
from fedflat.analysis.landscape import score_points
from fedflat.analysis.problem import Conditions, Options, Protocol, opened
from fedflat.analysis.results import plain
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError
from fedflat.extras import blank_figure

AnyModel = nn.Module | FlatModel
RATIOS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, eq=False)
class NoiseCurve:
    """Loss and error under random noise ε of growing size r = ‖ε‖/‖w‖: mean and standard deviation over the draws."""

    ratios: Tensor
    loss: Tensor
    loss_deviation: Tensor
    error: Tensor
    error_deviation: Tensor
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """Mean loss and error with a band of one standard deviation."""
        figure = blank_figure(10, 4)
        pairs = ((self.loss, self.loss_deviation), (self.error, self.error_deviation))
        ratios = self.ratios.numpy()
        for axes, pair, title in zip(figure.subplots(1, 2), pairs, ("loss", "error"), strict=True):
            mean, deviation = (values.numpy() for values in pair)
            axes.plot(ratios, mean, color=BLUE)
            axes.fill_between(ratios, mean - deviation, mean + deviation, color=BLUE, alpha=0.2)
            dress(axes, title, "‖noise‖ / ‖weights‖", "")
        return figure


def noise_curve(
    model: AnyModel,
    data: Any,
    *,
    ratios: Sequence[float] | Tensor = RATIOS,
    draws: int = 10,
    per_layer: bool = False,
    **options: Unpack[Options],
) -> NoiseCurve:
    """Robustness against noise on the weights. Each draw is one Gaussian direction, used for all ratios.

    Args:
        ratios: Values of ‖noise‖/‖weights‖.
        draws: Number of directions.
        per_layer: Scale the noise per tensor, to the norm of the model's tensor, instead of as a whole.
    """
    if draws < 1 or not len(ratios):
        raise InputError("at least one draw and one ratio are needed")
    with opened(model, data, Protocol.of(options)) as problem:
        origin = problem.flat.theta.clone()
        noises = [noise_direction(problem.flat, problem.protocol.seed, draw, per_layer) for draw in range(draws)]
        places = [
            [r if place == draw else 0.0 for place in range(draws)] for draw in range(draws) for r in map(float, ratios)
        ]
        rows = score_points(problem, None, places, origin, noises).reshape(draws, len(ratios), 2)
        mean, deviation = rows.mean(0), rows.std(0, correction=min(1, draws - 1))
        steps = torch.as_tensor(ratios, dtype=torch.float64)
        return NoiseCurve(steps, mean[:, 0], deviation[:, 0], mean[:, 1], deviation[:, 1], problem.conditions())


def noise_direction(flat: FlatModel, seed: int, draw: int, per_layer: bool = False) -> Tensor:
    """Gaussian noise with the norm of the weights, as a whole or per tensor."""
    noise = gaussian(flat, seed, draw)
    if not per_layer:
        return torch.mul(noise, flat.theta.norm() / noise.norm())
    for span in flat.spans:
        part = span.of(noise)
        part *= span.of(flat.theta).norm() / part.norm()
    return noise
