"""Several values in one option: `--lr 0.01,0.1 --seed 0..2` are six experiments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from fedflat.calls import split
from fedflat.errors import InputError
from fedflat.experiment import Experiment, coerce, field_type

MOST = 10_000  # runs that anybody can have meant


def combinations(options: Mapping[str, str]) -> list[dict[str, Any]]:
    """All combinations of the values that options name, the last fields of `Experiment` varying fastest."""
    names = [name for name in Experiment.__dataclass_fields__ if name in options]
    return [dict(zip(names, values, strict=True)) for values in product(*(values_in(n, options[n]) for n in names))]


def values_in(name: str, text: str) -> list[Any]:
    """The values of a field in a text: with commas between them; a..b are the whole numbers from a to b.

    >>> values_in("seed", "0..2,7"), values_in("partition", "lda_hsu(alpha=0.5),iid")
    ([0, 1, 2, 7], ['lda_hsu(alpha=0.5)', 'iid'])
    """
    counts = field_type(name)[0] is int
    found = [value for word in split(text) or [text] for value in (_counted(name, word) if counts else [word])]
    return list(dict.fromkeys(coerce(name, value) for value in found))


def _counted(name: str, word: str) -> list[Any]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", word)
    if ends is None:
        return [word]
    first, last = map(int, ends.groups())
    if not 0 <= last - first < MOST:
        raise InputError(f"{name} counts from the smaller to the larger number, at most {MOST} of them, not {word}")
    return list(range(first, last + 1))
