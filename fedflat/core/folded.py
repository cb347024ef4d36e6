"""Networks of several clients as one: their samples form one batch, and every layer applies each client's own weights.

Functions without weights treat samples one by one, so that they need not know of clients. Functions of weights have
rules here; a network that uses others is vectorised by `torch.vmap` instead, see `core.stacked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Rule = Callable[..., Any]
LARGE = 1 << 13  # numbers in a matrix from which a product in place is faster than one that is copied


class UnknownFunctionError(Exception):
    """A function of weights has no rule."""


class Gradients:
    """Where the backward pass puts the gradients of weights: into tensors that are there, without clearing them first.

    Args:
        places: The weights by `id`, each with its place. Everything else that a network computes has no place.
    """

    def __init__(self, places: Mapping[int, Tensor]) -> None:
        self.places = places
        self._written: set[int] = set()

    def start(self) -> None:
        """A backward pass begins."""
        self._written.clear()

    def finish(self) -> None:
        """It is over: the gradients of weights that it did not meet are zero."""
        for name, place in self.places.items():
            if name not in self._written:
                place.zero_()

    def put(self, weight: Tensor, gradient: Tensor) -> None:
        """Put or add the gradient of a weight."""
        place, name = self.places[id(weight)], id(weight)
        place.add_(gradient) if name in self._written else place.copy_(gradient)
        self._written.add(name)

    def put_product(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """The same for a product of matrices, one per row; a large one is computed in place."""
        place, name = self.places[id(weight)], id(weight)
        if place[0].numel() < LARGE:
            self.put(weight, torch.bmm(left, right))
        elif name in self._written:
            place.baddbmm_(left, right)
        else:
            torch.bmm(left, right, out=place)
        self._written.add(name)


class Folding(TorchFunctionMode):
    """While active, functions of weights that have one row per client act on each client's part of the batch.

    Args:
        count: The number of clients. Their samples are one batch, one client after the other.
        gradients: The weights, and where their gradients go.
        generators: Makes the clients' generators of dropout; called at the first draw.
        channels_last: Whether one client alone computes on images in this layout.
    """

    def __init__(
        self,
        count: int,
        gradients: Gradients,
        generators: Callable[[], list[torch.Generator]],
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.count, self.gradients, self.channels_last = count, gradients, channels_last
        self._make, self._made = generators, list[torch.Generator]()

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of dropout."""
        self._made = self._made or self._make()
        return self._made

    @property
    def draws(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._made)

    def owns(self, tensor: Any) -> bool:
        """Whether this is a weight with one row per client."""
        return id(tensor) in self.gradients.places

    def rows(self, x: Tensor) -> Tensor:
        """A batch with the clients as the first dimension."""
        return x.reshape(self.count, -1, *x.shape[1:])

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, *args, **kwargs)
        if any(map(self._holds, args)) or (kwargs and any(map(self._holds, kwargs.values()))):
            raise UnknownFunctionError(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)

    def _holds(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(map(self._holds, argument))
        return id(argument) in self.gradients.places

    def own(self, weight: Tensor | None) -> Tensor | None:
        """A weight for functions that autograd differentiates."""
        if weight is None:
            return None
        if not self.owns(weight):
            raise UnknownFunctionError("a function of weights that are partly trained")
        made: Tensor = _Weight.apply(weight, self.gradients)  # type: ignore[no-untyped-call]
        return made


class _Weight(torch.autograd.Function):
    """The weight as it is; its gradient goes into its place."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: Gradients) -> Tensor:
        ctx.weight, ctx.gradients = weight, gradients
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.gradients.put(ctx.weight, grads[0])
        return None, None


class _Linear(torch.autograd.Function):
    """x Wᵀ + b for every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        if ctx.needs_input_grad[1]:
            ctx.gradients.put_product(ctx.weight, grad.transpose(1, 2), x)
        if ctx.needs_input_grad[2]:
            ctx.gradients.put(ctx.bias, grad.sum(1))
        return torch.bmm(grad, ctx.weight) if ctx.needs_input_grad[0] else None, None, None, None


class _Conv2d(torch.autograd.Function):
    """A convolution for every row, one after the other: grouped convolutions are slower.

    The result is channels-last in memory, where pooling is many times as fast; its parts are put together anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.gradients, ctx.options = weight, bias, gradients, options
        biases = [None] * len(weight) if bias is None else bias.unbind()
        parts = [
            torch.conv2d(own, w, b, *options) for own, w, b in zip(x.chunk(len(weight)), weight, biases, strict=True)
        ]
        whole = torch.empty((len(x), *parts[0].shape[1:]), dtype=x.dtype, device=x.device, memory_format=_layout(x))
        return torch.cat(parts, out=whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        stride, padding, dilation, groups = ctx.options
        count, wanted = len(weight), [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
        whole = torch.empty_like(x) if wanted[0] else None
        found = [
            torch.ops.aten.convolution_backward(
                grad, own, w, list(w.shape[:1]), stride, padding, dilation, False, [0, 0], groups, wanted
            )
            for grad, own, w in zip(grads[0].chunk(count), x.chunk(count), weight, strict=True)
        ]
        for place, values in ((1, weight), (2, bias)):
            if wanted[place]:
                ctx.gradients.put(values, torch.stack([each[place] for each in found]))
        if whole is not None:
            torch.cat([each[0] for each in found], out=whole)
        return whole, None, None, None, None


def _layout(x: Tensor) -> torch.memory_format:
    """The faster layout of images; double precision has no kernels for channels-last."""
    return torch.contiguous_format if x.dtype == torch.float64 else torch.channels_last


def _linear(folding: Folding, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not folding.owns(weight) and not folding.owns(bias):
        return F.linear(input, weight, bias)
    _check(folding, weight, bias)
    rows = input.reshape(folding.count, -1, input.shape[-1])
    made: Tensor = _Linear.apply(rows, weight, bias, folding.gradients)  # type: ignore[no-untyped-call]
    return made.view(*input.shape[:-1], -1)


def _conv2d(
    folding: Folding,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if not folding.owns(weight) and not folding.owns(bias):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    _check(folding, weight, bias)
    if input.dim() != 4 or isinstance(padding, str):
        raise UnknownFunctionError("conv2d")
    options = *([n, n] if isinstance(n, int) else list(n) for n in (stride, padding, dilation)), groups
    made: Tensor = _Conv2d.apply(input, weight, bias, folding.gradients, options)  # type: ignore[no-untyped-call]
    return made


def _check(folding: Folding, weight: Tensor, bias: Tensor | None) -> None:
    if not folding.owns(weight) or not (bias is None or folding.owns(bias)):
        raise UnknownFunctionError("a layer that is trained in part")


def _scaled(folding: Folding, x: Tensor, weight: Tensor | None, bias: Tensor | None, places: int) -> Tensor:
    """Normalised samples times weight plus bias, `places` further dimensions after those of the weight."""
    rows = folding.rows(x)

    def spread(own: Tensor) -> Tensor:
        missing = rows.dim() - own.dim() - places
        return own.view(len(own), *[1] * missing, *own.shape[1:], *[1] * places)

    if weight is not None:
        rows = rows * spread(weight)
    return (rows if bias is None else rows + spread(bias)).view_as(x)


def _layer_norm(
    folding: Folding,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    plain = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scaled(folding, plain, folding.own(weight), folding.own(bias), 0)


def _group_norm(
    folding: Folding,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    plain = F.group_norm(input, num_groups, None, None, eps)
    return _scaled(folding, plain, folding.own(weight), folding.own(bias), input.dim() - 2)


def _dropout(folding: Folding, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The draws that each client makes alone."""
    if not training or p == 0:
        return input
    turned = folding.channels_last and not input.is_contiguous()
    return masked(folding.rows(input), folding.generators, p, turned).view_as(input)


def masked(rows: Tensor, generators: list[torch.Generator], p: float, channels_last: bool = False) -> Tensor:
    """Dropout with one generator per row: the draws that `F.dropout` makes of a single one.

    Args:
        rows: The inputs.
        generators: Of each row.
        p: The probability of a zero.
        channels_last: Whether a single one is channels-last in memory, whose order is that of the draws.
    """
    layout = torch.channels_last if channels_last and rows.dim() == 5 else torch.contiguous_format
    drawn = [
        torch.empty(rows.shape[1:], dtype=rows.dtype, memory_format=layout).bernoulli_(1 - p, generator=generator)
        for generator in generators
    ]
    return rows * torch.stack(drawn).div_(1 - p).to(rows.device)


def _view(folding: Folding, x: Tensor, *shape: Any) -> Tensor:
    return x.view(*shape) if isinstance(shape[0], torch.dtype) else x.reshape(*shape)  # layouts differ here


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.conv2d: _conv2d,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.dropout: _dropout,
    Tensor.view: _view,
}
"""What functions do with weights of several clients."""
