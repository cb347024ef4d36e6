"""A table of a paper as cells; each has an experiment and the value that the paper prints.

A TOML file in `presets/tables/`, or your own, has these keys:
- `rows`, `columns`: by name, changes to an experiment. A column may also have `preset`, the preset to start from;
  `quantity`, the reported quantity if it is not the preset's; and `plus`, parts to add to the rows' methods.
- `figures`: one list per row with the paper's values as printed, in the order of the columns; "" means no such cell,
  "–" a cell that the paper does not print, or only draws.
- `claims`: what is tested, stated before anything is run. Each has `says`, the sentence; `row` and `than`, the two rows
  that are compared; `columns`, those it is about [all]. The first row is to have the higher value, or with
  `lower = true` the lower, with `either = true` another, with `within = x` the same but for x, in the unit of the
  quantity. `beyond`, a column: its difference is taken off, so that the claim is about two gains.
- `samples`: the number of samples on which Hessians are analysed [1000].
- `watch`, `watch_every`: what to record beside accuracy, as in `fedflat run`.
- `scales`: smaller versions of the table. Each has `changes` for all cells, the `rows` and `columns` that remain (with
  further changes), `seeds` (how many, or a list of them), `quantity`, `minutes` on two cores, `about`, a description,
  and `why`, the reason for this scale. `samples`, `watch`, `watch_every` and `claims` of a scale replace the table's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment, read_toml
from fedflat.presets import FOLDER, Values, load_preset
from fedflat.report.table_checks import check

FULL = "full"  # the scale of the paper


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        figure: The paper's value, as printed.
        quantity: What it is, as in `fedflat.report.quantities`.
        experiments: The runs that reproduce it, one per seed.
        preset: The preset that they start from; empty for none.
    """

    row: str
    column: str
    figure: str
    quantity: str
    experiments: tuple[Experiment, ...] = ()
    preset: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper; the module explains the fields. source: where the table is in the paper."""

    id: str
    title: str
    source: str
    rows: Mapping[str, Values]
    columns: Mapping[str, Values]
    figures: Mapping[str, Sequence[str]]
    version: int = 1
    notes: Sequence[str] = ()
    claims: Sequence[Values] = ()
    samples: int = 1000
    watch: Sequence[str] = ()
    watch_every: int = 1
    scales: Mapping[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(vars(self), f"table {self.id}")

    def setting(self, name: str, scale: str = FULL) -> Any:
        """`claims`, `samples`, `watch` or `watch_every` of a scale, or else of the table."""
        return self.scale(scale).get(name, getattr(self, name))

    def scale(self, name: str) -> Values:
        """A smaller version of the table; empty for the full scale."""
        if name not in (FULL, *self.scales):
            raise UnknownNameError(f"scale of table {self.id}:", name, [FULL, *self.scales])
        return self.scales.get(name, {})

    def cells(self, scale: str = FULL, seeds: Sequence[int] = ()) -> list[Cell]:
        """The cells of a scale. seeds: the seeds to run, instead of the number that the paper or the scale gives."""
        reduction = self.scale(scale)
        return [
            self._cell(row, column, figure, reduction, seeds)
            for column in reduction.get("columns", self.columns)
            for row in reduction.get("rows", self.rows)
            if (figure := self._figure(row, column))
        ]

    def _figure(self, row: str, column: str) -> str:
        return self.figures[row][list(self.columns).index(column)]

    def _cell(self, row: str, column: str, figure: str, scale: Values, seeds: Sequence[int]) -> Cell:
        own = [scale.get("changes", {}), scale.get("columns", {}).get(column, {}), scale.get("rows", {}).get(row, {})]
        changes = {k: v for table in (self.columns[column], self.rows[row], *own) for k, v in table.items()}
        preset = load_preset(changes.pop("preset")) if "preset" in changes else None
        wanted = [scale.get("quantity"), changes.pop("quantity", None), preset and preset.report, "last()"]
        quantity = next(filter(None, wanted))
        method = "+".join(filter(None, (changes.get("method", "fedavg"), changes.pop("plus", ""))))
        make = preset.make if preset else Experiment
        wanted_seeds = scale.get("seeds") or (preset.seeds if preset else 0) or 1
        chosen = seeds or (wanted_seeds if isinstance(wanted_seeds, list) else range(wanted_seeds))
        runs = (make(**changes | {"method": method, "seed": seed}) for seed in chosen)
        return Cell(row, column, figure, quantity, tuple(runs), preset.id if preset else "")


def load_table(name: str) -> Table:
    """A table by its name, such as "003/table2", or from your own file, FILE.toml."""
    if name.endswith(".toml"):
        return _read(Path(name), Path(name).stem)
    known = table_files()
    if name not in known:
        raise UnknownNameError("table", name, known)
    return _read(known[name], name)


def table_files() -> dict[str, Path]:
    """The files of the built-in tables, by name."""
    files = sorted((FOLDER / "tables").glob("*.toml"), key=lambda path: (path.stem[:3], len(path.stem), path.stem))
    return {path.stem.replace("_", "/", 1): path for path in files}


def _read(path: Path, name: str) -> Table:
    values, known = read_toml(path), [spec.name for spec in fields(Table) if spec.name != "id"]
    for key in values:
        if key not in known:
            raise UnknownNameError(f"entry of {path}:", key, known)
    lacking = [key for key in ("title", "source", "rows", "columns", "figures") if key not in values]
    if lacking:
        raise InputError(f"{path} is not a table: it lacks {', '.join(lacking)}")
    return Table(id=name, **values)
