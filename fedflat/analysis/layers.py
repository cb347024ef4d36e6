"""Curvature of single layers and channels, beside the activations that MAN bounds it by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.hvp import PRODUCT, Hessian
from fedflat.analysis.lanczos import extreme_eigenpairs, first_steps
from fedflat.analysis.progress import announce, tracked
from fedflat.analysis.protocol import Conditions, Options, Problem, Protocol, opened, suited
from fedflat.analysis.results import plain
from fedflat.analysis.trace import hutchinson
from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel
from fedflat.groups import Group, layer_groups


@dataclass(frozen=True)
class LayerCurvature:
    """One block of the Hessian.

    largest, smallest: its extreme eigenvalues; residual: the larger of their residuals. trace, trace_error: of the
    block. input_moment: mean square of what enters the layer, over samples and entries, which MAN makes small;
    input_norm: mean over samples of its squared length. Both nan where no single layer owns the block.
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
    """Curvature layer by layer, or channel by channel."""

    rows: tuple[LayerCurvature, ...]
    conditions: Conditions

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """A matplotlib figure: eigenvalue and activation of each layer."""
        from fedflat.analysis.plots import layers_figure

        return layers_figure(self)


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
    """The diagonal blocks of the Hessian, one a layer.

    granularity: see `layer_groups`. layers: names of some groups; all where not given. probes: for each trace.
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
    """The blocks of single output channels of one layer: a row of its weight with its bias.

    layer: name of a module of the model, such as "head.classifier". channels: all where not given.
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
        self.size, self.dtype = len(positions), hessian.dtype

    def __call__(self, vector: Tensor) -> Tensor:
        """Product of the block with a vector as long as the positions."""
        padded = vector.new_zeros(self._hessian.size)
        padded[self._positions] = vector
        return self._hessian(padded)[self._positions]


def _channel_positions(hessian: Hessian, channel: int) -> Tensor:
    whole = torch.arange(hessian.size)
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
    like = torch.empty(block.size, dtype=block.dtype)
    top, bottom = extreme_eigenpairs(block, like, 1, tol=tol, seed=protocol.seed)
    found = hutchinson(block, like, probes=probes, seed=protocol.seed)
    worst = max(float(top.residuals[0]), float(bottom.residuals[0]))
    ends = float(top.values[0]), float(bottom.values[0])
    return LayerCurvature(name, block.size, *ends, worst, found.trace, found.trace_error, *moment)


def input_moments(problem: Problem, modules: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Mean square of the entries, and mean squared length a sample, of what enters each module; nan if nothing does."""
    sums = {name: [0.0, 0.0, 0.0] for name in modules}  # squares, entries, samples

    def watch(name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                x = inputs[0].detach()
                parts = (float(x.double().square().sum()), x.numel(), len(x))
                sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)]

        return note

    hooks = [problem.flat.submodule(name).register_forward_pre_hook(watch(name)) for name in sums]
    with torch.no_grad():
        for x, _ in problem.batches:
            problem.flat.module(suited(x, problem.flat.theta))
    for hook in hooks:
        hook.remove()
    nan = (float("nan"), float("nan"))
    return {name: (s / entries, s / samples) if entries else nan for name, (s, entries, samples) in sums.items()}
