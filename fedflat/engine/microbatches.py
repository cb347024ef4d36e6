"""Gradient accumulation: a minibatch that does not fit into memory is passed through the network in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedflat.core.batchnorm import batchnorms
from fedflat.core.inputs import map_inputs
from fedflat.core.part import fills
from fedflat.core.samples import IGNORED
from fedflat.core.views import Batch
from fedflat.engine.setup import Setup
from fedflat.errors import InputError

TERMS = ("loss", "further_losses", "around_forward")
"""Slots whose terms may be more than means over samples."""


def pieces(batch: Batch, size: int) -> Iterator[tuple[Batch, float]]:
    """The minibatch in pieces of at most `size` samples, each with its share of the targets that count."""
    y = batch.targets[0][1]
    ends = [(start, min(start + size, len(y))) for start in range(0, len(y), size)]
    for (start, stop), share in zip(ends, _shares(y, ends), strict=True):
        if share:  # a loss of nothing is no number

            def cut(leaf: Any, start: int = start, stop: int = stop) -> Any:
                return leaf[start:stop] if isinstance(leaf, Tensor) else leaf

            targets = tuple((weight, cut(labels)) for weight, labels in batch.targets)
            yield Batch(map_inputs(cut, batch.x), targets), share


def _shares(y: Tensor, ends: list[tuple[int, int]]) -> list[float]:
    if y.dim() < 2 or y.is_floating_point():
        return [(stop - start) / len(y) for start, stop in ends]
    counts = torch.stack([(y[start:stop] != IGNORED).sum() for start, stop in ends]).tolist()
    return [count / max(1, sum(counts)) for count in counts]


def check_pieces(setup: Setup) -> None:
    """Refuse `microbatch` where the loss of a minibatch is no mean of the losses of its pieces."""
    if setup.experiment.microbatch is None:
        return
    for part in setup.parts:
        if any(fills(part, slot) for slot in TERMS) and not part.sample_means:
            raise InputError(f"microbatch: the term that {part.name} adds to the loss is made of the whole minibatch")
    setup.model.module.train()
    for name, layer in batchnorms(setup.model.module):
        if layer.training:
            raise InputError(
                f"microbatch: {name} ({type(layer).__name__}) normalises by the statistics of what passes it together; "
                "take a model with GroupNorm or LayerNorm, or one that keeps this layer in evaluation mode"
            )
    _check_loss(setup)


@torch.no_grad()
def _check_loss(setup: Setup) -> None:
    samples = setup.federation.samples(0)
    x, y = samples.batch(torch.arange(min(4, len(samples))))
    setup.model.module.eval()
    try:
        output = setup.model(setup.federation.preprocess(x, None, setup.model.theta.dtype))
        whole = setup.criterion(output, y)
        cut = [share * setup.criterion(b.x, b.targets[0][1]) for b, share in pieces(Batch(output, ((1.0, y),)), 1)]
    except Exception:  # an own loss may take anything; training will tell
        return
    if cut and not torch.allclose(torch.stack(cut).sum(), whole, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise InputError("microbatch: the loss is no mean over samples, and pieces of a minibatch cannot be added up")
