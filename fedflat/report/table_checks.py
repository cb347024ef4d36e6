"""What the file of a table must hold, checked when it is read: a slip must not show after hours of runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment
from fedflat.presets import Values
from fedflat.report import claims
from fedflat.report.quantities import check_quantity
from fedflat.specs import fits
from fedflat.words import shortened

Rule = tuple[Callable[[Any], bool], str]  # whether a value fits, and what fits in words


def _of(hint: Any, words: str) -> Rule:
    return lambda value: fits(value, hint), words


def _is_table_of_tables(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())


def _is_seeds(value: Any) -> bool:
    listed = isinstance(value, list) and fits(value, tuple[int, ...]) and min(value, default=-1) >= 0
    return listed or (fits(value, int) and value >= 1)


TEXT, TEXTS = _of(str, "text in quotes"), _of(tuple[str, ...], "a list of texts in quotes")
TABLE = _of(Mapping, "a table")
TABLES: Rule = (_is_table_of_tables, 'a table of tables, as in "name" = { lr = 0.1 }')
COUNT: Rule = (lambda value: fits(value, int) and value >= 1, "a whole number from 1 up")
SETTINGS = {
    "claims": _of(tuple[dict[str, Any], ...], "a list of tables"),
    "samples": COUNT,
    "watch": TEXTS,
    "watch_every": COUNT,
}
WHOLE = SETTINGS | {"title": TEXT, "source": TEXT, "version": COUNT, "notes": TEXTS, "figures": TABLE}
WHOLE |= {"rows": TABLES, "columns": TABLES, "scales": TABLES}
SCALE = SETTINGS | {"about": TEXT, "why": TEXT, "quantity": TEXT, "changes": TABLE, "rows": TABLES, "columns": TABLES}
SCALE |= {"minutes": _of(float, "a number"), "seeds": (_is_seeds, "a whole number from 1 up, or a list of seeds")}
CHANGES = dict.fromkeys(("preset", "quantity", "plus", "method"), TEXT)  # the other changes: as in an experiment
FIELDS = {spec.name for spec in fields(Experiment)} | CHANGES.keys()


def check(table: Values, of: str) -> None:
    """Refuse a table that cannot be run to its end. of: what errors call it."""
    _fit(table, WHOLE, of)
    for row, figures in table["figures"].items():
        if row not in table["rows"]:
            raise UnknownNameError(f"row of {of}:", row, table["rows"])
        if not fits(figures, tuple[str, ...]):
            raise InputError(f"{of}: figures of row {row!r} must be {TEXTS[1]}, got {shortened(figures)}")
    for row in table["rows"]:
        if len(table["figures"].get(row, ())) != len(table["columns"]):
            raise InputError(f"{of}: row {row!r} needs a figure for each of {len(table['columns'])} columns")
    _check_changes(table, of)
    for claim in table["claims"]:
        claims.check(claim, of, table["rows"], table["columns"])
    for name, scale in table["scales"].items():
        _check_scale(scale, f"scale {name!r} of {of}", table, of)


def _check_scale(scale: Values, name: str, table: Values, of: str) -> None:
    for key in scale:
        if key not in SCALE:
            raise UnknownNameError(f"entry of {name}:", key, SCALE)
    if lacking := [key for key in ("about", "minutes") if key not in scale]:
        raise InputError(f"{name} lacks {' and '.join(lacking)}")
    _fit(scale, SCALE, name)
    for kind in ("row", "column"):
        _known(kind, scale.get(f"{kind}s", ()), table[f"{kind}s"], of)
    _check_changes(scale, name)
    for claim in scale.get("claims", ()):
        claims.check(claim, name, scale.get("rows", table["rows"]), scale.get("columns", table["columns"]))


def _known(kind: str, names: Collection[str], known: Collection[str], of: str) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{kind} of {of}:", name, known)


def _check_changes(holder: Values, of: str) -> None:
    """The changes of rows, of columns and of all cells, and the quantities among them."""
    named = {
        f"{kind} {name!r}": each for kind in ("row", "column") for name, each in holder.get(f"{kind}s", {}).items()
    }
    for name, changes in (named | {"changes": holder.get("changes", {})}).items():
        for key in changes:
            if key not in FIELDS:
                raise UnknownNameError(f"entry of {name} of {of}:", key, FIELDS)
        _fit(changes, CHANGES, f"{name} of {of}")
        _check_quantity(changes, f"{name} of {of}")
    _check_quantity(holder, of)


def _check_quantity(holder: Values, of: str) -> None:
    try:
        if "quantity" in holder:
            check_quantity(holder["quantity"])
    except InputError as error:
        raise InputError(f"{of}: {error}") from None


def _fit(values: Values, rules: Mapping[str, Rule], of: str) -> None:
    for name, (fitting, words) in rules.items():
        if name in values and not fitting(values[name]):
            raise InputError(f"{of}: {name!r} must be {words}, got {shortened(values[name])}")
