"""`FlatModel`: any `nn.Module` as one vector of weights and one vector of gradients.

A federated formula is then a vector formula, sending a model is a memory copy, and a checkpoint is one tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from fedflat.core.inputs import map_inputs
from fedflat.core.pool_first import pool_first
from fedflat.errors import InputError


@dataclass(frozen=True)
class Span:
    """The position of one named tensor in a flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, vector: Tensor) -> Tensor:
        """The tensor of this name as a view of `vector`; of rows of vectors, one tensor per row."""
        return vector[..., self.start : self.stop].view(vector.shape[:-1] + self.shape)

    def channels(self, vector: Tensor) -> Tensor:
        """The tensor as a matrix with one row per output channel (first dimension); of rows of vectors, one each."""
        return vector[..., self.start : self.stop].view(*vector.shape[:-1], self.shape[0], -1)


def names_within(spans: Iterable[Span], prefix: str) -> list[str]:
    """Names of the tensors of the submodule `prefix` (all tensors if it is empty)."""
    names = (span.name for span in spans)
    return [name for name in names if not prefix or name == prefix or name.startswith(prefix + ".")]


class Names(TypedDict):
    """The submodules that an experiment may name."""

    head: str | None
    features: str | None
    last_stage: str | None


class FlatModel:
    """A module whose trainable parameters are views of `theta` and whose gradients are views of `grad`.

    `backward()` writes directly into `grad`; writing to `theta` changes the module. The order is that of
    `module.named_parameters()`, so `theta` equals `torch.nn.utils.parameters_to_vector` of the trainable ones.
    Floating-point buffers (BatchNorm's statistics) are views of `buffers`, int64 ones (its counts) of `counters`.

    Args:
        module: The network; it is copied.
        dtype: Type of weights and floating-point inputs.
        head, features, last_stage: Names of submodules; see `Experiment`. The head defaults to the last `nn.Linear`.
        precision: With "bfloat16" layers compute in that type; weights, gradients and output keep theirs.
        device: Where weights, gradients and buffers are; None: where the module is.

    Attributes:
        make: Draws the network anew, from the global generators; None if that is not known.

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
        device: torch.device | None = None,
    ) -> None:
        self._original = copy.deepcopy(module).to(dtype)
        self.module = copy.deepcopy(self._original)
        pool_first(self.module)
        if device is not None:
            self.module.to(device)
        trainable = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError(f"{type(module).__name__} has no trainable parameter: there is nothing to learn")
        self.spans = _spans([(name, tuple(p.shape)) for name, p in trainable])
        self.theta = torch.cat([p.detach().reshape(-1) for _, p in trainable])
        self.grad = torch.zeros_like(self.theta)
        self._tie()
        self.buffers, self.buffer_spans = self._flatten_buffers(dtype)
        self.counters, self.counter_spans = self._flatten_buffers(torch.int64)
        self._names: Names = {"head": head, "features": features, "last_stage": last_stage}
        for name in filter(None, (head, features, last_stage)):
            self.submodule(name)
        self.make: Callable[[], nn.Module] | None = None
        self.captured: Tensor | None = None
        self._precision = precision
        self._network: Callable[[Any], Any] = self.module
        # The layout of images; None: as they come. float64 has no channels-last kernels.
        images = dtype != torch.float64 and any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        self._layout: torch.memory_format | None = torch.channels_last if images else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tie()  # gradients are not pickled with their parameters

    def _tie(self) -> None:
        """Make the trainable parameters and their gradients views of the two vectors.

        A parameter that two modules share stays shared. New `nn.Parameter`s rather than new `data`: the data of a
        parameter cannot move to another device.
        """
        views: dict[int, nn.Parameter] = {}
        for span in self.spans:
            views[id(self.module.get_parameter(span.name))] = view = nn.Parameter(span.of(self.theta))
            view.grad = span.of(self.grad)
        for module in self.module.modules():
            for name, owned in list(module._parameters.items()):
                if id(owned) in views:
                    setattr(module, name, views[id(owned)])  # recurrent layers keep a list of their own

    def _flatten_buffers(self, like: torch.dtype) -> tuple[Tensor, list[Span]]:
        """Make all buffers of one type views of one vector; a buffer that two modules share stays shared."""
        shared = _buffers(self.module, like)
        empty = torch.empty(0, dtype=like, device=self.theta.device)
        flat = torch.cat([empty, *(b.reshape(-1) for _, b in shared)])
        spans = _spans([(name, tuple(b.shape)) for name, b in shared])
        views = {id(buffer): span.of(flat) for (_, buffer), span in zip(shared, spans, strict=True)}
        for module in self.module.modules():
            for name, owned in module._buffers.items():
                if id(owned) in views:
                    module._buffers[name] = views[id(owned)]
        return flat, spans

    def __call__(self, x: Any) -> Any:
        """The module's output; inputs are first converted to the model's type and the faster memory layout."""
        try:
            return self._output(x)
        except RuntimeError as error:
            if self._layout == torch.contiguous_format or "view size is not compatible" not in str(error):
                raise
        self._layout = torch.contiguous_format  # x.view(len(x), -1) takes no other; the first trial finds out
        return self._output(x)

    def _output(self, x: Any) -> Any:
        x = self._suited(x) if isinstance(x, Tensor) else map_inputs(self._suited, x)
        if self._precision != "bfloat16":
            return self._forward(x)
        with torch.autocast(self.theta.device.type, dtype=torch.bfloat16):
            output = self._forward(x)
        return output.float() if isinstance(output, Tensor) else output

    def _forward(self, x: Any) -> Any:
        return self._network(x)

    def compute_by(self, network: Callable[[Any], Any]) -> None:
        """Use another form of `module` for forward passes from now on, such as a compiled one."""
        self._network = network

    def _suited(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != self.theta.dtype:
            x = x.to(self.theta.dtype)
        if self._layout is not None and isinstance(x, Tensor) and x.dim() == 4:
            x = channels_last(x) if self._layout == torch.channels_last else x.contiguous()
        return x

    def on(self, device: torch.device) -> FlatModel:
        """A copy on another device."""
        dtype, precision = self.theta.dtype, self._precision
        model = FlatModel(self._original, dtype, **self._names, precision=precision, device=device)
        for theirs, ours in ((model.theta, self.theta), (model.buffers, self.buffers), (model.counters, self.counters)):
            theirs.copy_(ours)
        model._layout = self._layout
        return model

    @property
    def size(self) -> int:
        """Number of trainable parameters, the unit of communication."""
        return self.theta.shape[-1]

    @property
    def frozen(self) -> list[tuple[str, Tensor]]:
        """The parameters that are not trained, by name: no vector holds them, and they are never sent."""
        trained = {id(self.module.get_parameter(span.name)) for span in self.spans}
        return [(name, p.detach()) for name, p in self.module.named_parameters() if id(p) not in trained]

    @cached_property
    def places(self) -> list[tuple[dict[str, Any], str, str]]:
        """Where the module keeps what the vectors hold: a dictionary, the key in it, and the name of the tensor.

        A tensor that several modules share has several places.
        """
        spans = (*self.spans, *self.buffer_spans, *self.counter_spans)
        held = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        names = {id(held[span.name]): span.name for span in spans}
        owners = (o for m in self.module.modules() for o in (m._parameters, m._buffers))
        return [(o, key, names[id(t)]) for o in owners for key, t in o.items() if id(t) in names]

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; a `StackedModel` does so for every client, see there."""
        return function(*args)

    def submodule(self, name: str) -> nn.Module:
        """The submodule called `name`; the error for an unknown name lists the top-level submodules."""
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            known = ", ".join(n for n, _ in self.module.named_children()) or "none"
            raise InputError(f"the model has no submodule {name!r}; its top-level ones: {known}") from None

    @property
    def head(self) -> str | None:
        """Name of the classifier: as given, or the last `nn.Linear` in module order; None if there is none."""
        linear = [name for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        return self._names["head"] or (linear[-1] if linear else None)

    def require_head(self, who: str) -> str:
        """The head's name; without a head, an error that names the part `who` and what to do."""
        if self.head is None:
            raise InputError(f"{who} needs a head, but the model has no Linear layer; name it with head='…'")
        return self.head

    def require_last_stage(self, who: str) -> str:
        """Name of the last stage: as given, or the last that the network declares in `stages`."""
        declared = [name for name in getattr(self.module, "stages", ()) if isinstance(name, str)]
        name = self._names["last_stage"] or (declared[-1] if declared else None)
        if name is None:
            raise InputError(f"{who} needs a last stage, but the network declares none; name it with last_stage='…'")
        return name

    def mask(self, prefix: str) -> Tensor:
        """A vector of weights: 1 on the parameters of the submodule `prefix`, 0 elsewhere."""
        self.submodule(prefix)
        out, within = self.theta.new_zeros(self.size), set(names_within(self.spans, prefix))
        for span in self.spans:
            if span.name in within:
                out[span.start : span.stop] = 1
        return out

    def restricted(self, only: Tensor | None) -> AbstractContextManager[None]:
        """Run the block without gradients for tensors outside the mask `only`, which saves their backward pass."""
        return nullcontext() if only is None else self._restricted(only)

    @contextmanager
    def _restricted(self, only: Tensor) -> Iterator[None]:
        leaves = self._trainable()
        touched = torch.stack([span.of(only).any() for span in self.spans]).tolist()
        if any(touched):
            for leaf, trains in zip(leaves, touched, strict=True):
                leaf.requires_grad_(trains)
        try:
            yield
        finally:
            for leaf in leaves:
                leaf.requires_grad_(True)

    def _trainable(self) -> list[nn.Parameter]:
        """The tensors that have gradients, in the order of `spans`."""
        return [self.module.get_parameter(span.name) for span in self.spans]

    def train(self) -> None:
        """Put the module into training mode."""
        if not self.module.training:  # PyTorch walks through all submodules
            self.module.train()

    def capture_features(self, who: str) -> AbstractContextManager[Any]:
        """Inside this block `take_features` returns the features of the last forward pass.

        Features are the output of the module named `features`, or the input of the head.

        Args:
            who: The part that needs them, named in the error if the model has neither.
        """
        if self._names["features"]:
            module = self.submodule(self._names["features"])
            return module.register_forward_hook(lambda _, args, output: setattr(self, "captured", output))
        if self.head is None:
            raise InputError(f"{who} needs features, but the model has no Linear head; name them with features='…'")
        return self.submodule(self.head).register_forward_pre_hook(lambda _, args: setattr(self, "captured", args[0]))

    def take_features(self) -> Tensor | None:
        """Return the captured features and forget them; None if none were captured."""
        taken, self.captured = self.captured, None
        return taken

    @contextmanager
    def loaded(self, theta: Tensor, buffers: Tensor | None = None) -> Iterator[None]:
        """Run the block with other weights; afterwards weights and buffers are restored bit for bit."""
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

    @contextmanager
    def mixed_with(self, second: Tensor | None, share: Tensor | float) -> Iterator[None]:
        """Inside this block the output is share · output + (1 − share) · the output at the weights `second`, if any."""
        if second is None:
            yield
            return
        plain, other = self._forward, second

        def forward(x: Any) -> Any:
            output = plain(x)
            with self.loaded(other):
                return share * output + (1 - share) * plain(x)

        self._forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._forward

    def export(self, theta: Tensor, buffers: Tensor, counters: Tensor) -> nn.Module:
        """An ordinary module with these weights, in evaluation mode; it shares no memory with this model."""
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


class MixedOutputs(nn.Module):
    """Two networks of which the outputs are mixed: share · first + (1 − share) · second."""

    def __init__(self, first: nn.Module, second: nn.Module, share: float) -> None:
        super().__init__()
        self.first, self.second, self.share = first, second, share

    def forward(self, x: Any) -> Any:
        """The mixed output."""
        return self.share * self.first(x) + (1 - self.share) * self.second(x)


def _buffers(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """The buffers of one type, each once. Buffers of other types, such as masks, are constants."""
    return [(name, buffer) for name, buffer in module.named_buffers() if buffer.dtype == dtype]


def channels_last(x: Tensor) -> Tensor:
    """Images in channels-last layout, in which PyTorch's pooling is ten times as fast.

    The two layouts of grey images are the same memory. Only strides like these tell a convolution which one is meant.
    """
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    height, width = x.shape[2:]
    return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))


def _spans(named: list[tuple[str, tuple[int, ...]]]) -> list[Span]:
    spans, start = [], 0
    for name, shape in named:
        stop = start + int(torch.Size(shape).numel())
        spans.append(Span(name, start, stop, shape))
        start = stop
    return spans
