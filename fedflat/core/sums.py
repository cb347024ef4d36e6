"""Sums in a fixed order, so that results do not depend on where and when terms arrive."""

from __future__ import annotations

from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Addable(Protocol):
    """A tensor, or something else that is added in place."""

    def add_(self, other: Any, /) -> Any:
        """Add `other`, which may be overwritten, and return the sum."""


T = TypeVar("T", bound=Addable)


class TreeSum(Generic[T]):
    """Sum of tensors that arrive one by one, always added along the same binary tree.

    The tree depends only on the positions. A machine that holds an aligned block of 2^k terms can add them itself:
    the result has the same bits. Rounding errors are smaller than in a running sum. Holds at most log2(n) + 1 tensors.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, T | None]] = []

    def __bool__(self) -> bool:
        return any(term is not None for _, term in self._stack)

    def add(self, term: T | None, positions: int = 1) -> None:
        """Add a tensor, which may be overwritten; None takes the position of a missing term.

        Args:
            term: The tensor.
            positions: How many positions it takes: it is the first of them, and the others are missing.
        """
        while positions:
            level = positions.bit_length() - 1
            if self._stack:
                level = min(level, self._stack[-1][0])  # the largest subtree that begins here
            positions -= 1 << level
            self._push(level, term)
            term = None

    def _push(self, level: int, term: T | None) -> None:
        """Add the sum of a subtree of 2^level positions."""
        while self._stack and self._stack[-1][0] == level:
            term = _join(self._stack.pop()[1], term)
            level += 1
        self._stack.append((level, term))

    def result(self) -> T:
        """The sum of at least one tensor."""
        total: T | None = None
        for _, term in reversed(self._stack):
            total = _join(term, total)
        self._stack = []
        if total is None:
            raise ValueError("there was nothing to add")
        return total


def _join(left: T | None, right: T | None) -> T | None:
    if left is None or right is None:
        return right if left is None else left
    joined: T = left.add_(right)
    return joined


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of the rows along the tree of `TreeSum`, with the same bits, in a few operations.

    A row of −0 takes the position of a missing term: adding it changes no bit.
    """
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        sums = rows[:even:2] + rows[1:even:2]
        rows = sums if even == rows.shape[0] else torch.cat([sums, rows[even:]])
    return rows[0]


class Summable(Protocol):
    """Terms of the sums of a round; they may be on another machine and be added there."""

    def add_(self, other: Self, /) -> Self:
        """Add `other`, which may be overwritten, and return the sum."""

    def here(self) -> Terms:
        """The tensors, on this machine."""


class Terms(dict[str, Tensor]):
    """Named tensors, added by name; a missing one counts as zero."""

    def add_(self, other: Terms, /) -> Terms:
        """See `Summable.add_`."""
        for name, tensor in other.items():
            self[name] = self[name].add_(tensor) if name in self else tensor
        return self

    def here(self) -> Terms:
        """See `Summable.here`."""
        return self
