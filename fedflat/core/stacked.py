"""`StackedModel`: the weights of several clients, one row each, in one network that computes all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.core.flat import FlatModel, channels_last
from fedflat.core.folded import Folding, Gradients, masked
from fedflat.core.gradients import backward
from fedflat.core.inputs import map_inputs

# The gradients are views of one matrix on purpose.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")


class StackedModel(FlatModel):
    """A `FlatModel` of several clients: `theta`, `grad`, `buffers` and `counters` have one row per client.

    The network is that of `model`. Its forward pass is vectorised over the rows (`torch.vmap`), and `backward()` writes
    each client's gradient directly into its row of `grad`. A network that `folds` is several times as fast, see
    `core.folded`.

    Args:
        model: The model of one client.
        generators: Makes the clients' generators of dropout, in the order of the rows; called at the first draw.
        count: The number of clients.
        folds: Whether the network is one of those that `core.folded` can compute.
    """

    def __init__(
        self, model: FlatModel, generators: Callable[[], list[torch.Generator]], count: int, folds: bool = False
    ) -> None:
        self.places = model.places
        self.__dict__.update(vars(model))
        self.theta, self.buffers, self.counters = (
            vector.expand(count, -1).clone() for vector in (model.theta, model.buffers, model.counters)
        )
        self.grad = torch.empty_like(self.theta)  # every backward pass writes all of it
        self.count, self.folds = count, folds
        self._alone = model._layout == torch.channels_last
        self._layout = None  # grouped convolutions, which `torch.vmap` makes, gain nothing from it
        self._dropout = RowDropout(generators, self._alone)
        self._inside: dict[str, Tensor] | None = None
        self._drops = False
        self._first: StackedModel | None = None
        self._generators = generators
        self._tie()

    def _tie(self) -> None:
        """Make leaves whose values and gradients are views of the matrices."""
        self._leaves: dict[str, nn.Parameter] = {}
        for span in self.spans:
            self._leaves[span.name] = leaf = nn.Parameter(span.of(self.theta))
            leaf.grad = span.of(self.grad)
        statistics = {span.name: span.of(self.buffers) for span in self.buffer_spans}
        statistics |= {span.name: span.of(self.counters) for span in self.counter_spans}
        self._tensors = self._leaves | statistics
        self._gradients = Gradients({id(leaf): leaf.grad for leaf in self._leaves.values() if leaf.grad is not None})
        self._folding = Folding(self.count, self._gradients, self._generators, self._alone)

    def each(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` for all clients at once; tensors in `args` have one entry per client.

        Inside, every tensor looks like that of one client, and calling this model applies that client's weights.
        """

        def one(tensors: dict[str, Tensor], *args: Any) -> Any:
            self._inside = tensors
            return function(*args)

        places = map_inputs(lambda leaf: 0 if isinstance(leaf, Tensor) else None, args)
        vectorised = torch.vmap(one, (0, *places), randomness="error")
        try:
            with self._dropout if self._drops else nullcontext():
                return vectorised(self._tensors, *args)
        except RuntimeError:
            if self._drops:
                raise
        finally:
            self._inside = None
        self._drops = True  # perhaps it met a random draw: look out for dropout from now on, which costs some time
        return self.each(function, *args)

    def __call__(self, x: Any) -> Any:
        """The clients' outputs for their own inputs; inside `each`, one client's output."""
        if self._inside:
            return super().__call__(x)
        return self._folded(x) if self.folds else self.each(super().__call__, x)

    def first(self, count: int) -> StackedModel:
        """The model of the first clients: their rows of the same matrices."""
        if count == self.count:
            return self
        if self._first is None or self._first.count != count:
            self._first, folding = None, self._folding  # nothing that refers back to this model, so that both are freed
            rows = StackedModel.__new__(StackedModel)
            rows.places = self.places
            rows.__dict__.update(vars(self))
            rows.theta, rows.grad, rows.buffers, rows.counters = (
                matrix[:count] for matrix in (self.theta, self.grad, self.buffers, self.counters)
            )
            rows.count, rows._generators = count, lambda: folding.generators[:count]
            rows._tie()
            self._first = rows
        for own, leaf in zip(self._first._leaves.values(), self._leaves.values(), strict=True):
            own.requires_grad_(leaf.requires_grad)
        return self._first

    def backpropagate(self, losses: Tensor) -> None:
        """Write the gradient of every client's loss into its row of `grad`."""
        if self.folds:
            self._gradients.start()
        else:
            self.grad.zero_()
        backward(losses.sum())
        if self.folds:
            self._gradients.finish()

    @property
    def draws(self) -> bool:
        """Whether dropout has drawn random numbers."""
        return self._dropout.used or self._folding.draws

    def _forward(self, x: Any) -> Any:
        assert self._inside is not None
        return functional_call(self.module, self._inside, (x,))

    def _folded(self, x: Any) -> Any:
        """The outputs of all clients, whose inputs form one batch."""

        def fold(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            batch = self._suited(leaf.flatten(0, 1))
            return channels_last(batch) if self._alone and batch.dim() == 4 else batch

        def unfold(leaf: Any) -> Any:
            return leaf.reshape(self.count, -1, *leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf

        with self._placed(), self._folding:
            output = self.module(map_inputs(fold, x))
        return map_inputs(unfold, output)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Run the block with the tensors of all clients in the module."""
        before = [owner[name] for owner, name, _ in self.places]
        try:
            for owner, name, mine in self.places:
                owner[name] = self._tensors[mine]
            yield
        finally:
            for (owner, name, _), old in zip(self.places, before, strict=True):
                owner[name] = old

    def _trainable(self) -> list[nn.Parameter]:
        return list(self._leaves.values())


class RowDropout(TorchFunctionMode):
    """While active, dropout inside `StackedModel.each` draws each client's mask from the client's own generator."""

    def __init__(self, generators: Callable[[], list[torch.Generator]], channels_last: bool = False) -> None:
        super().__init__()
        self._make, self._made, self._channels_last = generators, list[torch.Generator](), channels_last

    @property
    def used(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._made)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return self._drop(*args, **kwargs) if func is F.dropout else func(*args, **kwargs)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        self._made = self._made or self._make()
        dropped: Tensor = MaskedRows.apply(input, self._made, p, self._channels_last)  # type: ignore[no-untyped-call]
        return dropped


class MaskedRows(torch.autograd.Function):
    """Dropout of a batch of inputs, one generator per row: the draws that `F.dropout` makes of a single one."""

    @staticmethod
    def forward(input: Tensor, generators: list[torch.Generator], p: float, channels_last: bool) -> Tensor:
        """Never called: `each` always vectorises."""
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to keep: the rule for vmap is made of differentiable operations."""

    @staticmethod
    def vmap(
        info: Any,
        places: tuple[Any, ...],
        input: Tensor,
        generators: list[torch.Generator],
        p: float,
        channels_last: bool,
    ) -> tuple[Tensor, int]:
        """The rows, each with its own mask."""
        return masked(input.movedim(places[0], 0), generators, p, channels_last), 0
