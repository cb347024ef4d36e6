"""Our results next to the paper's, for the cells of a table whose runs have finished."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedflat.presets import Values
from fedflat.report.claims import gain, judged
from fedflat.report.paper_table import Cell
from fedflat.report.quantities import by_seed, shown, study_of, summary
from fedflat.report.tabular import markdown
from fedflat.runs.files import write_atomically
from fedflat.runs.records import record_of
from fedflat.runs.series import Member, series
from fedflat.runs.sharing import locked
from fedflat.studies.study import study

HEADS = ("column", "row", "ours", "paper")


def runs_of(cells: Iterable[Cell], out: Path) -> list[Member]:
    """The runs of all cells, each once: several cells may use the same run."""
    found = (member for cell in cells for member in series(cell.experiments, out, cell.preset))
    return list({member.folder: member for member in found}.values())


def reproduced(cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """One dict per cell: column, row, both results as text, ours as numbers, its seeds, method and folders."""
    return [_row(cell, out) for cell in cells]


def _row(cell: Cell, out: Path) -> dict[str, Any]:
    runs = runs_of([cell], out)
    done = [record_of(run.folder) for run in runs if run.finished]
    found = summary(cell.quantity, done)
    rounds = cell.experiments[0].rounds
    ours = shown(cell.quantity, found["mean"], found["std"], rounds)
    return {
        "column": cell.column,
        "row": cell.row,
        "ours": ours,
        "paper": cell.figure,
        "quantity": cell.quantity,
        **{name: value if value is not None and math.isfinite(value) else None for name, value in found.items()},
        "seeds": [record.experiment.seed for record in done],
        "method": cell.experiments[0].method,
        "folders": [run.folder.name for run in runs],
    }


def analyse(
    cells: Iterable[Cell], out: Path, samples: int, root: str | Path | None = None, device: str = "auto"
) -> None:
    """Make the analyses that the cells' quantities need, of finished runs that do not have them yet."""
    options: dict[str, Any] = {"root": root, "samples": samples, "device": device.split(",")[0]}
    wanted = {
        (run.folder, name): run for cell in cells if (name := study_of(cell.quantity)) for run in runs_of([cell], out)
    }
    tasks = [(run, name) for (_, name), run in wanted.items() if run.finished]
    for run, name in locked(tasks, lambda task: task[0].folder, lambda task: _is_there(*task, samples)):
        study([run.folder], [name], workers=0, progress=True, **options)


def _is_there(run: Member, name: str, samples: int) -> bool:
    path = run.folder / "analysis" / f"{name}.json"
    made = json.loads(path.read_text()) if path.exists() else {}
    return (made.get("samples"), made.get("rounds")) == (samples, run.experiment.rounds) and "headline" in made


ABOUT_P = (
    "p is two-sided and of each claim by itself, paired over seeds; below 0.05 it counts as decided. Where a claim "
    "states within how much two rows are equal, p is the larger of two one-sided ones: below 0.05 the difference is "
    "smaller than that, above 0.95 it is larger."
)
CLAIM_HEADS = ("claim", "column", "difference", "p", "seeds", "verdict")


def tested(claims: Sequence[Values], cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """One dict per claim and column: difference of the means, p-value, test, seeds and verdict, see `claims.judged`.

    With `beyond`, the difference is that of two gains: in the column, and in the one that `beyond` names.
    """
    known = {(cell.row, cell.column): cell for cell in cells}
    found = []
    for claim in claims:
        for column in claim.get("columns", dict.fromkeys(cell.column for cell in cells)):
            columns = [column, *([claim["beyond"]] if "beyond" in claim else [])]
            places = [(claim[row], name) for name in columns for row in ("row", "than")]
            if all(place in known for place in places):
                groups = [_values(known[place], out) for place in places]
                one, other = (gain(*groups[:2]), gain(*groups[2:])) if "beyond" in claim else groups
                found.append({"claim": claim["says"], "column": column} | judged(claim, one, other))
    return found


def _values(cell: Cell, out: Path) -> dict[int, float]:
    return by_seed(cell.quantity, [record_of(run.folder) for run in runs_of([cell], out) if run.finished])


def write(
    rows: Sequence[dict[str, Any]], notes: Sequence[str], out: Path, claims: Sequence[dict[str, Any]] = ()
) -> list[Path]:
    """Write the rows, the tested claims and the notes as `table.json` and `table.md`; returns the two paths."""
    text = markdown(HEADS, [[row[head] for head in HEADS] for row in rows], notes)
    if claims:
        text += "\n" + markdown(
            CLAIM_HEADS, [[str(claim[head]) for head in CLAIM_HEADS] for claim in claims], [ABOUT_P]
        )
    content = {"notes": notes, "cells": rows, "claims": list(claims)}
    texts = {"table.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n", "table.md": text}
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    return [out / name for name in texts]
