"""Updates in columns are the updates that were put in."""

from __future__ import annotations

import math

import torch

from fedflat.core.updates import Updates
from fedflat.core.views import Update


def some() -> list[Update]:
    return [
        Update(7, 12, 0.25, weight=0.5, steps=3, weighted_steps=2.5, loss=1.5, norm=2.0, floats=9),
        Update(2, 4, 0.5, loss=math.nan, failure="its loss is nan at step 1"),
        Update(
            9, 5, 0.125, weight=0.1, metrics={"drift": 0.5}, delta=torch.ones(3), states={"part": {"c": torch.ones(2)}}
        ),
    ]


def test_columns_hold_every_field() -> None:
    made = Updates.of(some())
    assert len(made) == 3
    for mine, theirs in zip(made, some(), strict=True):
        assert str(mine) == str(theirs)  # nan is not equal to itself
    assert str(made[-1]) == str(some()[2]) and [update.client for update in made[:2]] == [7, 2]


def test_what_failed_is_not_counted() -> None:
    made = Updates.of(some())
    assert [update.client for update in made.usable] == made.counted["client"].tolist() == [7, 9]
    assert made.failures == {1: "its loss is nan at step 1"}
