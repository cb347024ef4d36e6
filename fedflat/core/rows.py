"""Lengths, dot products and directions of vectors.

A vector is the last dimension: `[d]` for one client, `[clients, d]` for several. Every function acts on each row, and
returns one number per row as `[..., 1]`, which multiplies the rows without further words. The result stays on the
device of the argument: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Number = float | Tensor
"""A number of one client, or one per row as `[rows, 1]`."""
TINY = 1e-16  # added to lengths, so that a zero vector stays zero


def norms(rows: Tensor) -> Tensor:
    """Euclidean length of every row.

    >>> norms(torch.tensor([3.0, 4.0]))
    tensor([5.])
    """
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return lengths


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Dot product of every row with its counterpart.

    >>> dots(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 1.0]))
    tensor([[3.],
            [7.]])
    """
    return (left * right).sum(dim=-1, keepdim=True)


def unit(rows: Tensor) -> Tensor:
    """Every row scaled to length one (a zero row stays zero).

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    return rows / norms(rows).add_(TINY)


def unit_(rows: Tensor) -> Tensor:
    """`unit`, in place."""
    return rows.div_(norms(rows).add_(TINY))


def bounded(rows: Tensor, limit: float | Tensor | None) -> Tensor:
    """Every row, shortened to length `limit`, or to its own limit, if it is longer; None: no limit.

    >>> bounded(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    return rows if limit is None else rows * (limit / norms(rows)).clamp_(max=1.0)


def clip_(rows: Tensor, limit: float) -> Tensor:
    """Shorten every row to length `limit` in place, with the formula of `torch.nn.utils.clip_grad_norm_`."""
    factors = (limit / norms(rows).add_(1e-6)).clamp_(max=1.0)
    if rows.dim() == 1 and rows.is_cpu and factors.item() == 1.0:  # elsewhere the host would have to wait
        return rows
    return rows.mul_(factors)


def add_(rows: Tensor, others: Tensor, factor: Number) -> Tensor:
    """Add `factor` times `others` to the rows, in place."""
    return rows.addcmul_(others, factor) if isinstance(factor, Tensor) else rows.add_(others, alpha=factor)


def each(function: Callable[..., float], *numbers: Number) -> Number:
    """`function` of plain numbers, for every row.

    >>> each(max, 2.0, torch.tensor([[1.0], [3.0]]))
    tensor([[2.],
            [3.]])
    """
    columns = [number for number in numbers if isinstance(number, Tensor)]
    if not columns:
        return function(*numbers)
    lists = [n.flatten().tolist() if isinstance(n, Tensor) else [n] * len(columns[0]) for n in numbers]
    return columns[0].new_tensor([[function(*row)] for row in zip(*lists, strict=True)])


def one(like: Tensor, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """The number `value` for every row of `like`: `[1]` for a vector, `[rows, 1]` for a matrix."""
    return torch.full_like(like[..., :1], value, dtype=dtype)
