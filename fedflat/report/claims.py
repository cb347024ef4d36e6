"""Claims about two rows of a table: what one may hold, and what the values of both by seed say about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any

from fedflat.errors import InputError, UnknownNameError
from fedflat.presets import Values
from fedflat.report.significance import ENOUGH, compared, equivalence
from fedflat.specs import fits
from fedflat.words import MISSING

NEEDED = ("says", "row", "than")
FORMS = ("lower", "either", "within")  # a claim has one of them, or none: the first row has the higher value
KINDS: dict[str, tuple[Any, str]] = dict.fromkeys((*NEEDED, "beyond"), (str, "text")) | {
    "lower": (bool, "true or false"),
    "either": (bool, "true or false"),
    "within": (float, "a number above 0"),
    "columns": (tuple[str, ...], "a list of columns"),
}
UNDECIDED = "not decidable"


def check(claim: Values, of: str, rows: Collection[str], columns: Collection[str]) -> None:
    """Refuse a claim that cannot be tested with these rows and columns. of: what errors call the table."""
    for name, value in claim.items():
        if name not in KINDS:
            raise UnknownNameError(f"entry of a claim of {of}:", name, KINDS)
        if not fits(value, KINDS[name][0]) or (name == "within" and value <= 0):
            raise InputError(f"{of}: {name!r} of a claim must be {KINDS[name][1]}, got {value!r}")
    for name in (*NEEDED, *(["columns"] if "beyond" in claim else [])):
        if name not in claim:
            raise InputError(f"{of}: a claim needs {name!r}, got {dict(claim)}")
    if len(given := [name for name in FORMS if name in claim]) > 1:
        raise InputError(f"{of}: a claim has either {given[0]!r} or {given[1]!r}, got {dict(claim)}")
    for kind, names, known in (
        ("row", (claim["row"], claim["than"]), rows),
        ("column", (*claim.get("columns", ()), claim.get("beyond")), columns),
    ):
        for name in names:
            if name is not None and name not in known:
                raise UnknownNameError(f"{kind} of {of}:", name, known)


def gain(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """By how much the first is higher, for each seed that both have.

    >>> gain({0: 3.0, 1: 5.0}, {0: 1.0, 2: 4.0})
    {0: 2.0}
    """
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def judged(claim: Values, one: Mapping[int, float], other: Mapping[int, float], level: float = 0.05) -> dict[str, Any]:
    """Difference of the means, p-value, test, number of common seeds, and the verdict on a claim.

    The test is Student's, paired over common seeds, and Welch's where there are too few. "confirmed": significant in
    the direction that the claim states, or in any with `either`; "contradicted": significant in the other. With
    `within`, two one-sided tests: "confirmed" if the difference is significantly smaller than that, "contradicted" if
    it is significantly larger. Else "not decidable".
    """
    seeds = sorted(one.keys() & other.keys())
    if len(seeds) >= ENOUGH:  # so that the difference is that of the pairs that are tested
        one, other = ({seed: group[seed] for seed in seeds} for group in (one, other))
    if not one or not other or not all(map(math.isfinite, (*one.values(), *other.values()))):
        return {"difference": MISSING, "p": MISSING, "test": None, "seeds": len(seeds), "verdict": UNDECIDED}
    test, p, verdict = _decided(claim, one, other, level)
    return {
        "difference": f"{fmean(one.values()) - fmean(other.values()):+.4g}",
        "p": "too few seeds" if p is None else f"{p:.3f}",
        "test": test,
        "seeds": len(seeds),
        "verdict": verdict,
    }


def _decided(
    claim: Values, one: Mapping[int, float], other: Mapping[int, float], level: float
) -> tuple[str | None, float | None, str]:
    """The test's name, its p-value and the verdict."""
    test = compared(one, other)
    if test is None:
        return None, None, UNDECIDED
    if "within" in claim:
        p = equivalence(one, other, claim["within"])
        decided, for_it = not level <= p <= 1 - level, p < level
        name = f"two one-sided {test.name}s"
    else:
        p, name = test.p, test.name
        decided = p < level
        for_it = claim.get("either", False) or (test.statistic < 0) == claim.get("lower", False)
    return name, p, ("confirmed" if for_it else "contradicted") if decided else UNDECIDED
