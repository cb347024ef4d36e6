"""Curvature of single layers and channels, together with the input norms by which MAN bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.drawing import BLUE, RED, dress
from fedflat.analysis.hvp import PRODUCT, Hessian
from fedflat.analysis.lanczos import extreme_eigenpairs, first_steps
from fedflat.analysis.problem import Conditions, Options, Problem, Protocol, opened, suited
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.core.flat import FlatModel
from fedflat.core.groups import Group, layer_groups
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import blank_figure


@dataclass(frozen=True)
class LayerCurvature:
    """One diagonal block of the Hessian.

    Attributes:
        largest, smallest: Its extreme eigenvalues.
        residual: The larger of their two residuals.
        trace, trace_error: Trace of the block and its standard error.
        input_moment: Mean square of the layer's input over samples and entries, which MAN makes small.
        input_norm: Mean over samples of the squared norm of the layer's input. Both are nan if the block belongs to
            no single layer.
    """

    name: str
    parameters: int
    largest: float
    smallest: float
    residual: float
    trace: float
    trace_error: float
    input_moment: float
    input_norm: float

    def to_dict(self) -> dict[str, Any]:
        """Numbers and text only."""
        return plain(self)


@dataclass(frozen=True)
class LayerTable:
    """Curvature per layer or per channel."""

    rows: tuple[LayerCurvature, ...]
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """Largest eigenvalue and input second moment of every layer, on one logarithmic axis."""
        figure = blank_figure(7, 1.5 + 0.3 * len(self.rows))
        axes = figure.subplots()
        places = range(len(self.rows))
        axes.plot([row.largest for row in self.rows], places, "o", color=BLUE, label="largest eigenvalue")
        axes.plot([row.input_moment for row in self.rows], places, "s", color=RED, label="mean square of the input")
        axes.set_yticks(list(places), [row.name for row in self.rows])
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.invert_yaxis()
        dress(axes, "curvature by layer", "", "")
        axes.legend(frameon=False)
        return figure


def layer_curvature(
    model: nn.Module | FlatModel,
    data: Any,
    *,
    granularity: str = "weight",
    layers: Sequence[str] | None = None,
    tol: float = 1e-3,
    probes: int = 20,
    **options: Unpack[Options],
) -> LayerTable:
    """Curvature of the diagonal blocks of the Hessian, one block per layer.

    Args:
        granularity: What counts as a layer; see `layer_groups`.
        layers: Names of the layers to analyse; None takes all.
        tol: See `extreme_eigenpairs`.
        probes: Number of random probes per trace.
    """
    protocol = Protocol.of(options)
    with opened(model, data, protocol) as problem:
        groups = _chosen(layer_groups(problem.flat, granularity), layers)
        moments = input_moments(problem, [group.module for group in groups])
        expected = sum(first_steps(group.size, 1) + probes for group in groups)
        announce(protocol.progress, "layer curvature", expected, PRODUCT * problem.seconds)
        rows = []
        with tracked(protocol.progress, "layer curvature", expected) as step:
            for group in groups:
                with Hessian(problem, list(group.spans)) as hessian:
                    hessian.step = step
                    rows.append(_row(hessian, group.name, moments[group.module], tol, probes, protocol))
        return LayerTable(tuple(rows), problem.conditions())


def channel_curvature(
    model: nn.Module | FlatModel,
    data: Any,
    layer: str,
    *,
    channels: Sequence[int] | None = None,
    tol: float = 1e-3,
    probes: int = 20,
    **options: Unpack[Options],
) -> LayerTable:
    """Curvature per output channel of one layer; a channel is one row of the weight with its bias.

    Args:
        layer: Name of a module of the model, such as "head.classifier".
        channels: Numbers of the channels to analyse; None takes all.
    """
    protocol = Protocol.of(options)
    with opened(model, data, protocol) as problem:
        group = _chosen(layer_groups(problem.flat, "module"), [layer])[0]
        moment = input_moments(problem, [layer])[layer]
        with Hessian(problem, list(group.spans)) as hessian:
            count = hessian.spans[0].shape[0]
            chosen = range(count) if channels is None else channels
            if any(not 0 <= channel < count for channel in chosen):
                raise InputError(f"layer {layer!r} has channels 0 to {count - 1}, got {list(chosen)}")
            expected = len(chosen) * (first_steps(hessian.size // count, 1) + probes)
            announce(protocol.progress, "channel curvature", expected, hessian.seconds)
            rows = []
            with tracked(protocol.progress, "channel curvature", expected) as hessian.step:
                for channel in chosen:
                    block = Block(hessian, _channel_positions(hessian, channel))
                    name = f"{layer}[{channel}]"
                    rows.append(_row(block, name, moment, tol, probes, protocol))
        return LayerTable(tuple(rows), problem.conditions())


class Block:
    """The diagonal block of a Hessian at some positions."""

    def __init__(self, hessian: Hessian, positions: Tensor) -> None:
        self._hessian, self._positions = hessian, positions
        self.size, self.like = len(positions), hessian.like.new_empty(len(positions))

    def __call__(self, vector: Tensor) -> Tensor:
        """Product of the block with a vector that has one entry per position."""
        padded = vector.new_zeros(self._hessian.size)
        padded[self._positions] = vector
        return self._hessian(padded)[self._positions]


def _channel_positions(hessian: Hessian, channel: int) -> Tensor:
    whole = torch.arange(hessian.size, device=hessian.like.device)
    rows = [span.channels(whole)[channel] for span in hessian.spans if span.shape and channel < span.shape[0]]
    return torch.cat(rows)


def _chosen(groups: list[Group], names: Sequence[str] | None) -> list[Group]:
    by_name = {group.name: group for group in groups}
    for name in names or ():
        if name not in by_name:
            raise UnknownNameError("layer", name, by_name)
    return groups if names is None else [by_name[name] for name in names]


def _row(
    block: Hessian | Block,
    name: str,
    moment: tuple[float, float],
    tol: float,
    probes: int,
    protocol: Protocol,
) -> LayerCurvature:
    top, bottom = extreme_eigenpairs(block, block.like, 1, tol=tol, seed=protocol.seed)
    found = hutchinson(block, block.like, probes=probes, seed=protocol.seed)
    worst = max(float(top.residuals[0]), float(bottom.residuals[0]))
    ends = float(top.values[0]), float(bottom.values[0])
    return LayerCurvature(name, block.size, *ends, worst, found.trace, found.trace_error, *moment)


def input_moments(problem: Problem, modules: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Mean square of the entries and mean squared norm per sample of each module's input; nan without an input."""
    squares = {name: torch.zeros((), dtype=torch.float64) for name in modules}  # kept where the inputs are
    counts = {name: [0, 0] for name in modules}  # entries, samples

    def watch(name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                x = inputs[0].detach()
                squares[name] = squares[name] + x.double().square().sum()
                counts[name] = [counts[name][0] + x.numel(), counts[name][1] + len(x)]

        return note

    hooks = [problem.flat.submodule(name).register_forward_pre_hook(watch(name)) for name in counts]
    with torch.no_grad():
        for x, _ in problem.batches:
            problem.flat.module(suited(x, problem.flat.theta))
    for hook in hooks:
        hook.remove()
    nan = (float("nan"), float("nan"))
    totals = {name: float(found) for name, found in squares.items()}
    return {name: (totals[name] / e, totals[name] / n) if e else nan for name, (e, n) in counts.items()}
