"""Vectors are the last dimension: what holds for one vector holds for every row of a stack."""

from __future__ import annotations

import pytest
import torch
from helpers import draws

from fedflat.core import rows


@pytest.mark.parametrize("function", [rows.norms, rows.unit, lambda v: rows.bounded(v, 2.0)])
def test_a_stack_of_vectors_is_treated_row_by_row(function: object) -> None:
    stack = torch.randn(5, 7, generator=draws(), dtype=torch.float64)
    assert callable(function)
    torch.testing.assert_close(function(stack), torch.stack([function(row) for row in stack]), rtol=1e-14, atol=0)


def test_a_bound_shortens_long_vectors_and_keeps_the_bits_of_short_ones() -> None:
    long, short = torch.tensor([30.0, 40.0]), torch.tensor([0.1, -0.2])
    assert rows.bounded(long, 1.0).norm().item() == pytest.approx(1)
    assert rows.bounded(short, 1.0).equal(short)
    assert rows.clip_(short.clone(), 1.0).equal(short)


def test_clipping_is_that_of_torch() -> None:
    ours = torch.randn(100, generator=draws()) * 3
    theirs = torch.nn.Parameter(torch.zeros(100))
    theirs.grad = ours.clone()
    torch.nn.utils.clip_grad_norm_([theirs], 1.5)
    assert rows.clip_(ours, 1.5).equal(theirs.grad)
