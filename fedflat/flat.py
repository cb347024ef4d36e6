"""`FlatModel`: any `nn.Module` as one vector of weights and one vector of gradients.

A federated formula is then a vector formula, sending a model is a memory copy, and a checkpoint is one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import InputError


@dataclass(frozen=True)
class Span:
    """Where one named tensor lives in a flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, vector: Tensor) -> Tensor:
        """The tensor of this name as a view of `vector`."""
        return vector[self.start : self.stop].view(self.shape)

    def channels(self, vector: Tensor) -> Tensor:
        """The same as a matrix: one row per output channel (index of the first dimension)."""
        return vector[self.start : self.stop].view(self.shape[0], -1)


def unit(vector: Tensor) -> Tensor:
    """`vector` at Euclidean length one (the zero vector stays zero)."""
    return torch.div(vector, vector.norm().item() + 1e-16)


def bounded(vector: Tensor, limit: float | None) -> Tensor:
    """`vector`, shortened to Euclidean length `limit` where it is longer; None is no limit."""
    norm = vector.norm().item()
    return vector if limit is None or norm <= limit else vector * (limit / norm)


def names_within(spans: Iterable[Span], prefix: str) -> list[str]:
    """Names of the tensors of the submodule `prefix` (of all, when it is empty)."""
    names = (span.name for span in spans)
    return [name for name in names if not prefix or name == prefix or name.startswith(prefix + ".")]


class FlatModel:
    """A module whose trainable parameters are views of `theta`, their gradients views of `grad`.

    `backward()` writes straight into `grad`; writing to `theta` changes the module. The order is that of
    `module.named_parameters()`, so `theta` equals `torch.nn.utils.parameters_to_vector` of the trainable ones.
    Floating-point buffers (BatchNorm's statistics) are views of `buffers`, int64 ones (its counts) of `counters`.

    head, features, last_stage: names of submodules; see `Experiment`. The head defaults to the last `nn.Linear`.
    precision: "bfloat16" has the kernels compute in it, while weights, gradients and output stay as they are.

    >>> model = FlatModel(nn.Linear(2, 1))
    >>> model.theta.zero_().shape
    torch.Size([3])
    >>> model.module.weight
    Parameter containing:
    tensor([[0., 0.]], requires_grad=True)
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        *,
        head: str | None = None,
        features: str | None = None,
        last_stage: str | None = None,
        precision: str = "float32",
    ) -> None:
        self._original = copy.deepcopy(module).to(dtype)
        self.module = copy.deepcopy(self._original)
        trainable = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError(f"{type(module).__name__} has no trainable parameter: there is nothing to learn")
        self.spans = _spans([(name, tuple(p.shape)) for name, p in trainable])
        self.theta = torch.cat([p.detach().reshape(-1) for _, p in trainable])
        self.grad = torch.zeros_like(self.theta)
        self._tie()
        self.buffers, self.buffer_spans = self._flatten_buffers(dtype)
        self.counters, self.counter_spans = self._flatten_buffers(torch.int64)
        self._names = {"head": head, "features": features, "last_stage": last_stage}
        for name in filter(None, self._names.values()):
            self.submodule(name)
        self.captured: Tensor | None = None
        self._precision = precision
        self._channels_last = dtype != torch.float64 and _gains_from_channels_last(self.module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tie()  # gradients are not pickled with their parameters

    def _tie(self) -> None:
        """Make the trainable parameters and their gradients views of the two vectors."""
        for span in self.spans:
            parameter = self.module.get_parameter(span.name)
            parameter.data, parameter.grad = span.of(self.theta), span.of(self.grad)

    def _flatten_buffers(self, like: torch.dtype) -> tuple[Tensor, list[Span]]:
        """Make the buffers of one type views of one vector; a buffer that two modules share stays shared."""
        shared = _buffers(self.module, like)
        flat = torch.cat([torch.empty(0, dtype=like), *(b.reshape(-1) for _, b in shared)])
        spans = _spans([(name, tuple(b.shape)) for name, b in shared])
        views = {id(buffer): span.of(flat) for (_, buffer), span in zip(shared, spans, strict=True)}
        for module in self.module.modules():
            for name, owned in module._buffers.items():
                if id(owned) in views:
                    module._buffers[name] = views[id(owned)]
        return flat, spans

    def __call__(self, x: Any) -> Any:
        """The module's output; images and vectors are brought to the model's type and the faster layout first."""
        x = self._suited(x)
        if self._precision == "float32":
            return self.module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.module(x)
        return output.float() if isinstance(output, Tensor) else output

    def _suited(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {key: self._suited(value) for key, value in x.items()}
        if type(x) in (list, tuple):
            return type(x)(self._suited(value) for value in x)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != self.theta.dtype:
            x = x.to(self.theta.dtype)
        if self._channels_last and isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    @property
    def size(self) -> int:
        """Number of trainable parameters, the unit of communication."""
        return self.theta.numel()

    def submodule(self, name: str) -> nn.Module:
        """The submodule called `name`, or an error that lists the top-level ones."""
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            known = ", ".join(n for n, _ in self.module.named_children()) or "none"
            raise InputError(f"the model has no submodule {name!r}; its top-level ones: {known}") from None

    @property
    def head(self) -> str | None:
        """Name of the classifier: the one given, or the last `nn.Linear` in module order."""
        linear = [name for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        return self._names["head"] or (linear[-1] if linear else None)

    def require_head(self, who: str) -> str:
        """The head's name, or an error that tells the user of `who` how to name one."""
        if self.head is None:
            raise InputError(f"{who} needs a head, but the model has no Linear layer; name it with head='…'")
        return self.head

    def require_last_stage(self, who: str) -> str:
        """Name of the last stage: the one given, or the last that the network declares in `stages`."""
        declared = [name for name in getattr(self.module, "stages", ()) if isinstance(name, str)]
        name = self._names["last_stage"] or (declared[-1] if declared else None)
        if name is None:
            raise InputError(f"{who} needs a last stage, and the network does not declare one: name it, last_stage='…'")
        return name

    def mask(self, prefix: str) -> Tensor:
        """1 on the parameters of the submodule `prefix`, 0 elsewhere (a vector like `theta`)."""
        self.submodule(prefix)
        out, within = torch.zeros_like(self.theta), set(names_within(self.spans, prefix))
        for span in self.spans:
            if span.name in within:
                out[span.start : span.stop] = 1
        return out

    @contextmanager
    def restricted(self, only: Tensor | None) -> Iterator[None]:
        """Run the block without gradients for tensors that the mask `only` leaves out: those need no backward pass."""
        parameters = [self.module.get_parameter(span.name) for span in self.spans]
        if only is not None and bool(only.any()):
            for span, parameter in zip(self.spans, parameters, strict=True):
                parameter.requires_grad_(bool(span.of(only).any()))
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)

    def capture_features(self, who: str) -> None:
        """From now on keep the features of every forward pass in `captured`.

        They are the output of the module named `features`, or the input of the head.
        who: the part that asks, for the error when the model offers neither.
        """
        if self._names["features"]:
            self.submodule(self._names["features"]).register_forward_hook(
                lambda module, args, output: setattr(self, "captured", output)
            )
            return
        if self.head is None:
            raise InputError(f"{who} needs features, but the model has no Linear head; name them with features='…'")
        self.submodule(self.head).register_forward_pre_hook(lambda module, args: setattr(self, "captured", args[0]))

    def take_features(self) -> Tensor | None:
        """The features of the last forward pass, once; None if it did not meet them or nobody asked for them."""
        taken, self.captured = self.captured, None
        return taken

    @contextmanager
    def loaded(self, theta: Tensor, buffers: Tensor | None = None) -> Iterator[None]:
        """Run the block with other weights; weights and buffers come back bit for bit."""
        saved, saved_buffers, saved_counters = self.theta.clone(), self.buffers.clone(), self.counters.clone()
        self.theta.copy_(theta)
        if buffers is not None:
            self.buffers.copy_(buffers)
        try:
            yield
        finally:
            self.theta.copy_(saved)
            self.buffers.copy_(saved_buffers)
            self.counters.copy_(saved_counters)

    def export(self, theta: Tensor, buffers: Tensor, counters: Tensor) -> nn.Module:
        """An ordinary module with these weights, in evaluation mode, that shares nothing with this one."""
        module = copy.deepcopy(self._original)
        values = {span.name: span.of(theta) for span in self.spans}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
            for flat, spans in ((buffers, self.buffer_spans), (counters, self.counter_spans)):
                for (_, buffer), span in zip(_buffers(module, flat.dtype), spans, strict=True):
                    buffer.copy_(span.of(flat))
        return module.eval()


def _buffers(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """The buffers of one type, each once; masks and other types are constants and stay where they are."""
    return [(name, buffer) for name, buffer in module.named_buffers() if buffer.dtype == dtype]


def _gains_from_channels_last(module: nn.Module) -> bool:
    """Whether the layout pays: thin convolutions only pay for the conversion (float64 ones have no such kernel)."""
    return any(isinstance(m, nn.Conv2d) and m.in_channels >= 32 for m in module.modules())


def _spans(named: list[tuple[str, tuple[int, ...]]]) -> list[Span]:
    spans, start = [], 0
    for name, shape in named:
        stop = start + int(torch.Size(shape).numel())
        spans.append(Span(name, start, stop, shape))
        start = stop
    return spans
