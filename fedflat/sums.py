"""Sums whose order is fixed, wherever and whenever the terms arrive."""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """Sum of tensors that arrive one by one, always added along the same binary tree.

    The tree depends only on the positions, so a machine that holds an aligned block of 2^k terms can add them itself
    and the result has the same bits. It also rounds less than a running sum. Holds at most log2(n) + 1 tensors.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, Tensor | None]] = []

    def add(self, term: Tensor | None) -> None:
        """Add a tensor, which is taken over and may be overwritten; None keeps the place of one that is missing."""
        level = 0
        while self._stack and self._stack[-1][0] == level:
            term = _join(self._stack.pop()[1], term)
            level += 1
        self._stack.append((level, term))

    def result(self) -> Tensor:
        """The sum of at least one tensor."""
        total: Tensor | None = None
        for _, term in reversed(self._stack):
            total = _join(term, total)
        self._stack = []
        if total is None:
            raise ValueError("there was nothing to add")
        return total


def _join(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
