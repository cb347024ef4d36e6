"""A table of a paper as cells: which experiment each is, and the figure that the paper has there.

A file of `tables/`, or one of your own: `rows` and `columns` are tables of changes to an experiment by name, `figures`
has one list a row with the paper's figures in the order of the columns, as they are printed; an empty one means that
there is no such cell. Besides fields of `Experiment` a column may have `preset`, to start from; `quantity`, the figure
that is reported, if it is not the preset's; and `plus`, parts that are added to the rows' methods. A table of `scales`
is a declared reduction: `changes` for all cells, `rows` and `columns` that are kept (columns with further changes),
`seeds`, `quantity`, `minutes` on two cores, and `about`, which says all that to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment, read_toml
from fedflat.presets import FOLDER, Values, load_preset

FULL = "full"  # the scale of the paper


@dataclass(frozen=True)
class Cell:
    """One figure of a table: where it stands, what the paper has, and the runs, one a seed, that are to give ours.

    preset: that they start from, if there is one. missing: why it cannot be run, if it cannot; then there are no runs.
    """

    row: str
    column: str
    figure: str
    quantity: str
    experiments: tuple[Experiment, ...] = ()
    preset: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper; see the module for its parts. source: where it stands in the paper."""

    id: str
    title: str
    source: str
    rows: Mapping[str, Values]
    columns: Mapping[str, Values]
    figures: Mapping[str, Sequence[str]]
    version: int = 1
    notes: Sequence[str] = ()
    scales: Mapping[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(self.figures.get(row, ())) != len(self.columns):
                raise InputError(f"table {self.id}: row {row!r} needs a figure for each of {len(self.columns)} columns")
        for scale in self.scales.values():
            for kind, known in (("row", self.rows), ("column", self.columns)):
                for name in set(scale.get(f"{kind}s", ())) - set(known):
                    raise UnknownNameError(f"{kind} of table {self.id}:", name, known)

    def scale(self, name: str) -> Values:
        """A declared reduction; nothing for the full scale."""
        if name not in (FULL, *self.scales):
            raise UnknownNameError(f"scale of table {self.id}:", name, [FULL, *self.scales])
        return self.scales.get(name, {})

    def cells(self, scale: str = FULL, seeds: Sequence[int] = ()) -> list[Cell]:
        """The cells of a scale. seeds: those of the runs, instead of as many as the paper or the scale has."""
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
        if preset and preset.missing:
            return Cell(row, column, figure, quantity, missing=preset.missing)
        method = "+".join(filter(None, (changes.get("method", "fedavg"), changes.pop("plus", ""))))
        make = preset.make if preset else Experiment
        chosen = seeds or range(scale.get("seeds") or (preset.seeds if preset else 0) or 1)
        runs = (make(**changes | {"method": method, "seed": seed}) for seed in chosen)
        return Cell(row, column, figure, quantity, tuple(runs), preset.id if preset else "")


def load_table(name: str) -> Table:
    """A table by its name, such as "003/table2", or from a file of your own, FILE.toml."""
    if name.endswith(".toml"):
        return _read(Path(name), Path(name).stem)
    known = table_files()
    if name not in known:
        raise UnknownNameError("table", name, known)
    return _read(known[name], name)


def table_files() -> dict[str, Path]:
    """The files of the tables there are, by name."""
    files = sorted((FOLDER / "tables").glob("*.toml"), key=lambda path: (path.stem[:3], len(path.stem), path.stem))
    return {path.stem.replace("_", "/"): path for path in files}


def _read(path: Path, name: str) -> Table:
    values, known = read_toml(path), [spec.name for spec in fields(Table) if spec.name != "id"]
    for key in values:
        if key not in known:
            raise UnknownNameError(f"entry of {path}:", key, known)
    lacking = [key for key in ("title", "source", "rows", "columns", "figures") if key not in values]
    if lacking:
        raise InputError(f"{path} is no table: it lacks {', '.join(lacking)}")
    return Table(id=name, **values)
