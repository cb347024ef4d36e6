"""The conditions of every analysis; they are the same for all, so that results are comparable.

An analysis works on a copy of the model: evaluation mode, dropout off, BatchNorm with its running statistics, fixed
samples in a fixed order, one thread per process. It computes where the model is (on the CPU if that device has no
double precision), and its results come back on the CPU. The model itself stays bit for bit as it was, even after an
error, and the global random generators are restored. Parameters without `requires_grad` are constants. Half-precision
weights are converted to single precision, which holds them exactly.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.analysis.batches import Batch, cut, placed, read, subset, take
from fedflat.analysis.progress import Progress
from fedflat.core import streams
from fedflat.core.batchnorm import forget_statistics
from fedflat.core.devices import CPU, home_of, kind_of, on, prepared
from fedflat.core.flat import FlatModel, Span
from fedflat.core.inputs import map_inputs
from fedflat.core.processes import single_thread
from fedflat.core.samples import IGNORED
from fedflat.errors import InputError, UnknownNameError

Loss = Callable[[Any, Tensor], Tensor]
log = logging.getLogger(__name__)
ROUNDING = 1e-4  # of a gradient: two evaluations on an accelerator may differ so much, if they must


class Options(TypedDict, total=False):
    """The options of every analysis; `Protocol` explains them."""

    loss: Loss
    bn: str
    max_samples: int | None
    seed: int
    batch_size: int | None
    memory: float
    workers: int
    progress: Progress


@dataclass(frozen=True)
class Protocol:
    """The options of an analysis.

    Args:
        loss: Function of (output, labels) that returns the mean loss, without penalties.
        bn: "running" uses BatchNorm's running statistics, "batch" those of each batch, without tracking them.
        max_samples: Use a fixed random subset of this size; None uses all samples.
        seed: Seed of the subset and of random probes and directions.
        batch_size: Largest number of samples per batch; the data is cut into equal batches. None chooses by `memory`.
            It changes results by rounding only, except with bn="batch" and in `gradient_variance`.
        memory: GiB for activations. Batches are cut to fit. If there is room, graphs are kept between Hessian
            products, which makes products faster by half. Vectors of the model's size need additional memory. On a
            device, data of at most this size lie there; of larger ones each batch is copied when it is needed.
        workers: Number of processes with one thread each; 1 computes in this process, 0 uses every core. The result
            does not depend on it. A model on an accelerator is analysed in this process.
        progress: True shows a bar on stderr; a function is called with the number of steps done and the total.
    """

    loss: Loss = F.cross_entropy
    bn: str = "running"
    max_samples: int | None = None
    seed: int = 0
    batch_size: int | None = None
    memory: float = 2.0
    workers: int = 1
    progress: Progress = False

    def __post_init__(self) -> None:
        if self.bn not in ("running", "batch"):
            raise UnknownNameError("bn", self.bn, ("running", "batch"))
        if not 0 < self.memory < math.inf:
            raise InputError(f"memory must be a positive number of GiB, got {self.memory}")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.workers < 0:
            raise InputError(f"workers must not be negative, got {self.workers}")

    @classmethod
    def of(cls, options: Options) -> Protocol:
        """A protocol from keyword options; an unknown option raises an error that names the most similar one."""
        known = [entry.name for entry in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownNameError("option", name, known)
        return cls(**options)


@dataclass(frozen=True)
class Conditions:
    """What a result was computed on: numbers of samples and parameters, seed, mode, mean loss, precision."""

    samples: int
    parameters: int
    seed: int
    mode: str
    loss: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Numbers and text only."""
        return asdict(self)


@dataclass
class Problem:
    """A private copy of a model, with the batches and the loss of the analysis."""

    flat: FlatModel
    batches: list[Batch]
    protocol: Protocol
    seconds: float = field(default=0.0, init=False)  # duration of one gradient
    loss: float = field(default=math.nan, init=False)
    gradient: Tensor = field(init=False)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(y) for _, y in self.batches)

    @property
    def device(self) -> torch.device:
        """Where the analysis computes."""
        return self.flat.theta.device

    @property
    def workers(self) -> int:
        """The number of processes asked for; see `Protocol.workers`."""
        return self.protocol.workers if self.device == CPU else 1

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters, in the order of the spans."""
        named = dict(self.flat.module.named_parameters())
        return [named[span.name] for span in self.flat.spans]

    @cached_property
    def _weights(self) -> list[float]:
        """Weight of each batch in the mean: its number of samples, or of labels that are not ignored."""
        counts = [len(y) for _, y in self.batches]
        if not self.batches[0][1].is_floating_point():
            counts = torch.stack([(y != IGNORED).sum() for _, y in self.batches]).tolist()
        return [count / max(sum(counts), 1) for count in counts]

    def weight(self, index: int) -> float:
        """Weight of a batch in the mean over samples."""
        return self._weights[index]

    def batch_loss(self, index: int) -> Tensor:
        """Mean loss of one batch."""
        x, y = self.batches[index]
        return self.value(self.flat.module(suited(x, self.flat.theta)), y)

    def sample_bytes(self) -> int:
        """Memory per sample of the graph of a Hessian product."""
        x, y = max(self.batches, key=lambda batch: len(batch[1]))

        def loss(count: int) -> Tensor:
            few = slice(0, count)
            return self.value(self.flat.module(suited(take(x, few), self.flat.theta)), y[few])

        with understood():
            return graph_bytes(loss, self.parameters, len(y))

    def value(self, output: Any, y: Tensor) -> Tensor:
        """The loss of an output; floating-point labels are converted to the type of the weights."""
        loss = self.protocol.loss(output, suited(y, self.flat.theta))
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise InputError(
                "the loss must be one number, the mean over the batch; give loss=a function that returns it"
            )
        return loss

    def evaluate(self) -> tuple[float, Tensor]:
        """Mean loss and gradient over the data."""
        losses, gradient = [], torch.zeros_like(self.flat.theta)
        for index in range(len(self.batches)):
            loss, parts = self.batch_gradient(index)
            losses.append(loss)
            add_parts(gradient, self.flat.spans, parts, self.weight(index))
        return self.mean(torch.stack(losses).tolist()), gradient  # the host waits once, not for every batch

    def mean(self, values: Sequence[float]) -> float:
        """The weighted mean of one number per batch."""
        total = 0.0
        for index, value in enumerate(values):
            total += self.weight(index) * value
        return total

    def batch_gradient(self, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mean loss of one batch and its gradient, one tensor per parameter; empty if the loss depends on none."""
        with understood():
            loss = self.batch_loss(index)
            if not loss.requires_grad:
                return loss, ()
            return loss.detach(), torch.autograd.grad(loss, self.parameters, materialize_grads=True)

    def check(self) -> None:
        """Raise an error if the loss is not finite or if a second evaluation gives other bits."""
        self.loss, self.gradient = self.evaluate()
        if not (math.isfinite(self.loss) and bool(self.gradient.isfinite().all())):
            what = "loss" if not math.isfinite(self.loss) else "gradient"
            raise InputError(
                f"the {what} is not finite (loss {self.loss}): check weights and data, or choose another loss"
            )
        began = time.perf_counter()
        loss, gradient = self.evaluate()
        self.seconds = time.perf_counter() - began
        if loss != self.loss or not torch.equal(gradient, self.gradient):
            spans = (span.name for span in self.flat.spans if not torch.equal(*map(span.of, (gradient, self.gradient))))
            what = (
                f"a loss of {self.loss!r}, then {loss!r}" if loss != self.loss else f"other gradients of {next(spans)}"
            )
            if self.device != CPU and torch.allclose(gradient, self.gradient, rtol=ROUNDING, atol=ROUNDING):
                log.warning("an operation of the model has no deterministic kernel on %s: %s", self.device, what)
                return
            raise InputError(
                f"the model is not deterministic: two evaluations of the same data gave {what}; "
                "turn off whatever draws random numbers or counts calls in evaluation mode"
            )

    def conditions(self) -> Conditions:
        """The conditions to report with a result."""
        mode = f"eval, BatchNorm by {self.protocol.bn} statistics"
        kind = str(self.flat.theta.dtype).removeprefix("torch.")
        return Conditions(self.samples, self.flat.size, self.protocol.seed, mode, self.loss, kind)


@contextmanager
def understood() -> Iterator[None]:
    """Turn errors of the model or the loss about the data into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the model or the loss cannot take the data: {error}; check the shapes, the labels and loss=…"
        ) from error


def suited(x: Any, like: Tensor) -> Any:
    """An input where the weights are, its floating-point tensors of their type."""

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = on(t, like.device)
        return t.to(like.dtype) if t.is_floating_point() else t

    return map_inputs(leaf, x)


def add_parts(total: Tensor, spans: list[Span], parts: Any, weight: float) -> None:
    """Add weight·parts, one tensor or None per span, to a vector over the same spans."""
    for span, part in zip(spans, parts, strict=False):
        if part is not None:
            span.of(total).add_(part, alpha=weight)


@contextmanager
def opened(model: nn.Module | FlatModel, data: Any, protocol: Protocol) -> Iterator[Problem]:
    """A checked problem for a model and data; see the module."""
    with _quiet(protocol.seed), on_home_of(model):
        problem = unchecked(model, data, protocol)
        problem.check()
        yield problem


def unchecked(model: nn.Module | FlatModel, data: Any, protocol: Protocol) -> Problem:
    """A problem without the two evaluations of the check."""
    flat = private_copy(model, protocol.bn)
    batches, device = read(data), flat.theta.device
    if isinstance(protocol.loss, nn.Module):
        protocol = replace(protocol, loss=copy.deepcopy(protocol.loss).to(device))
    if protocol.max_samples is not None:
        batches = subset(batches, protocol.max_samples, protocol.seed)
    batches = placed(batches, device, int(protocol.memory * 2**30))
    problem = Problem(flat, batches, protocol)
    if protocol.batch_size is not None:
        problem.batches = cut(batches, protocol.batch_size)
    elif protocol.bn != "batch":
        problem.batches = cut(batches, fitting(problem), shared=True)
    elif len(batches) == 1 and len(batches[0][1]) > kind_of(device).widest:
        raise InputError("bn='batch' depends on what a batch is: give batch_size, or the data as batches")
    return problem


def fitting(problem: Problem) -> int:
    """The largest batch size such that eight batches fit into `memory`."""
    widest = kind_of(problem.device).widest
    return max(1, min(widest, int(problem.protocol.memory * 2**30 / 8 / max(problem.sample_bytes(), 1))))


def private_copy(model: nn.Module | FlatModel, bn: str = "running") -> FlatModel:
    """A copy in evaluation mode that shares nothing with the model."""
    module = model.module if isinstance(model, FlatModel) else model
    trainable = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    if not trainable:
        raise InputError(
            f"nothing in {type(module).__name__} requires a gradient: "
            "call requires_grad_() on the parameters to be analysed"
        )
    try:
        own = copy.deepcopy(module).to(home_of(trainable[0].device))
        flat = FlatModel(own, torch.promote_types(trainable[0].dtype, torch.float32))
    except RuntimeError as error:
        raise InputError(f"{type(module).__name__} cannot be copied ({error}): detach the tensors it keeps") from None
    flat.module.eval()
    if bn == "batch":
        forget_statistics(flat.module)
    return flat


@contextmanager
def on_home_of(model: nn.Module | FlatModel) -> Iterator[None]:
    """Prepare the device on which the model is analysed.

    cuDNN's recurrent layers have no gradient in evaluation mode and no second one: PyTorch's own are used instead.
    """
    module = model.module if isinstance(model, FlatModel) else model
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    with prepared(home_of(parameters[0].device) if parameters else CPU), ExitStack() as stack:
        if parameters and any(isinstance(each, nn.RNNBase) for each in module.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False, allow_tf32=False))
        yield


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """One thread, isolated random generators, and attention kernels that can be differentiated twice."""
    isolated = streams.isolated(seed, "analysis")
    with single_thread(), isolated, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield


def graph_bytes(loss: Callable[[int], Tensor], parameters: Sequence[Tensor], samples: int) -> int:
    """Bytes per sample that automatic differentiation keeps for one Hessian product.

    It measures two numbers of samples and takes the difference, so that memory that does not grow with the samples
    cancels; with fewer than four samples that memory counts too.

    Args:
        loss: Returns the loss of the first n samples.
        samples: Number of samples available.
    """
    few, more = 2, 4
    if samples < more:
        return _kept(loss, samples, parameters) // samples
    return max(_kept(loss, more, parameters) - _kept(loss, few, parameters), 0) // (more - few)


def _kept(loss: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor]) -> int:
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(count)
        # Hold the first derivative until all is counted: freed memory could be counted again.
        held = value.requires_grad and torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    del held
    return sum(sizes.values())
