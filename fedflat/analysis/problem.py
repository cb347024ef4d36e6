"""A private copy of a model, with the data and the loss to look at it with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedflat.analysis.data import Batch, take
from fedflat.analysis.memory import graph_bytes
from fedflat.analysis.options import Protocol
from fedflat.data.federation import IGNORED
from fedflat.errors import InputError
from fedflat.flat import FlatModel, Span


@dataclass(frozen=True)
class Conditions:
    """What a result was computed on: samples, parameters, the seed, the mode, the mean loss there, the precision."""

    samples: int
    parameters: int
    seed: int
    mode: str
    loss: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary."""
        return asdict(self)


@dataclass
class Problem:
    """A private copy of a model, and the batches and the loss to look at it with."""

    flat: FlatModel
    batches: list[Batch]
    protocol: Protocol
    seconds: float = field(default=0.0, init=False)  # of one gradient
    loss: float = field(default=math.nan, init=False)
    gradient: Tensor = field(init=False)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(y) for _, y in self.batches)

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters, in the order of the spans."""
        named = dict(self.flat.module.named_parameters())
        return [named[span.name] for span in self.flat.spans]

    @cached_property
    def _shares(self) -> list[float]:
        """Of each batch in the mean: by its samples, or by its labels where some are to be ignored."""
        counts = [len(y) if y.is_floating_point() else int((y != IGNORED).sum()) for _, y in self.batches]
        return [count / max(sum(counts), 1) for count in counts]

    def weight(self, index: int) -> float:
        """Share of a batch in the mean over samples."""
        return self._shares[index]

    def batch_loss(self, index: int) -> Tensor:
        """Mean loss of one batch."""
        x, y = self.batches[index]
        return self.value(self.flat.module(suited(x, self.flat.theta)), y)

    def sample_bytes(self) -> int:
        """What the graph of a Hessian product takes for one sample."""
        x, y = max(self.batches, key=lambda batch: len(batch[1]))

        def loss(count: int) -> Tensor:
            few = slice(0, count)
            return self.value(self.flat.module(suited(take(x, few), self.flat.theta)), y[few])

        with understood():
            return graph_bytes(loss, self.parameters, len(y))

    def value(self, output: Any, y: Tensor) -> Tensor:
        """The loss of an output, with floating-point labels brought to its type."""
        loss = self.protocol.loss(output, suited(y, self.flat.theta))
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise InputError(
                "the loss must be one number, the mean over the batch; give loss=a function that returns it"
            )
        return loss

    def evaluate(self) -> tuple[float, Tensor]:
        """Mean loss and gradient over the data."""
        total, gradient = 0.0, torch.zeros_like(self.flat.theta)
        for index in range(len(self.batches)):
            loss, parts = self.batch_gradient(index)
            total += self.weight(index) * loss
            add_parts(gradient, self.flat.spans, parts, self.weight(index))
        return total, gradient

    def batch_gradient(self, index: int) -> tuple[float, tuple[Tensor, ...]]:
        """Mean loss of one batch and its gradient, a tensor a parameter; none where the loss depends on none."""
        with understood():
            loss = self.batch_loss(index)
            if not loss.requires_grad:
                return loss.item(), ()
            return loss.item(), torch.autograd.grad(loss, self.parameters, materialize_grads=True)

    def check(self) -> None:
        """Refuse a loss that is not finite, or that has other bits the second time."""
        self.loss, self.gradient = self.evaluate()
        if not (math.isfinite(self.loss) and bool(self.gradient.isfinite().all())):
            what = "loss" if not math.isfinite(self.loss) else "gradient"
            raise InputError(
                f"the {what} is not finite (loss {self.loss}): check weights and data, or choose another loss"
            )
        began = time.perf_counter()
        loss, gradient = self.evaluate()
        self.seconds = time.perf_counter() - began
        differs = [span.name for span in self.flat.spans if not torch.equal(span.of(gradient), span.of(self.gradient))]
        if loss != self.loss or differs:
            what = (
                f"a loss of {self.loss!r}, then {loss!r}" if loss != self.loss else f"other gradients of {differs[0]}"
            )
            raise InputError(
                f"the model is not deterministic: two evaluations of the same data gave {what}; "
                "turn off whatever draws random numbers or counts calls in evaluation mode"
            )

    def conditions(self) -> Conditions:
        """What to report beside a result."""
        mode = f"eval, BatchNorm by {self.protocol.bn} statistics"
        kind = str(self.flat.theta.dtype).removeprefix("torch.")
        return Conditions(self.samples, self.flat.size, self.protocol.seed, mode, self.loss, kind)


@contextmanager
def understood() -> Iterator[None]:
    """What a model or a loss says of data that it cannot take, as an error of ours."""
    try:
        yield
    except InputError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the model or the loss cannot take the data: {error}; check the shapes, the labels and loss=…"
        ) from error


def suited(x: Any, like: Tensor) -> Any:
    """Floating-point tensors of an input in the type of the weights."""
    if isinstance(x, dict):
        return {key: suited(value, like) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(suited(value, like) for value in x)
    return x.to(like.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def add_parts(total: Tensor, spans: list[Span], parts: Any, weight: float) -> None:
    """Add tensors, one a span or None, to a vector over the same spans."""
    for span, part in zip(spans, parts, strict=False):
        if part is not None:
            span.of(total).add_(part, alpha=weight)
