"""Our results next to the paper's, for the cells of a table whose runs have finished."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedflat.presets import Values
from fedflat.report.paper_table import Cell
from fedflat.report.quantities import by_seed, shown, study_of, summary
from fedflat.report.significance import compared
from fedflat.report.tabular import markdown
from fedflat.runs.files import write_atomically
from fedflat.runs.records import record_of
from fedflat.runs.series import Member, series
from fedflat.runs.sharing import locked
from fedflat.studies.study import study
from fedflat.words import MISSING

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


ABOUT_P = "p is two-sided and of each claim by itself, paired over seeds; below 0.05 it counts as decided."
CLAIM_HEADS = ("claim", "column", "difference", "p", "seeds", "verdict")


def tested(claims: Sequence[Values], cells: Sequence[Cell], out: Path, level: float = 0.05) -> list[dict[str, Any]]:
    """One dict per claim and column: difference of the means, p-value, test, seeds and verdict.

    The test is Student's, paired over common seeds, and Welch's where there are too few. "confirmed": significant in
    the direction that the claim states; "contradicted": significant in the other; else "not decidable".
    """
    found = []
    for claim in claims:
        rows = {name: {c.column: c for c in cells if c.row == claim[name]} for name in ("row", "than")}
        for column in claim.get("columns", rows["row"]):
            if all(column in row for row in rows.values()):
                pair = [rows["row"][column], rows["than"][column]]
                found.append({"claim": claim["says"], "column": column} | _verdict(pair, claim, out, level))
    return found


def _verdict(pair: Sequence[Cell], claim: Values, out: Path, level: float) -> dict[str, Any]:
    runs = [[record_of(run.folder) for run in runs_of([cell], out) if run.finished] for cell in pair]
    one, other = (by_seed(cell.quantity, done) for cell, done in zip(pair, runs, strict=True))
    seeds = sorted(one.keys() & other.keys())
    if not one or not other or not all(map(math.isfinite, (*one.values(), *other.values()))):
        return {"difference": MISSING, "p": MISSING, "test": None, "seeds": len(seeds), "verdict": "not decidable"}
    gap = fmean(one.values()) - fmean(other.values())
    test, verdict = compared(one, other), "not decidable"
    if test and test.p < level:
        verdict = "confirmed" if (gap < 0) == claim.get("lower", False) else "contradicted"
    p = f"{test.p:.3f}" if test else "too few seeds"
    return {"difference": f"{gap:+.4g}", "p": p, "test": test and test.name, "seeds": len(seeds), "verdict": verdict}


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
