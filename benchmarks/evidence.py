"""Collect what the tables of docs/results.md were made of, from the folders of `fedflat reproduce --out FOLDER`.

    python benchmarks/evidence.py FOLDER… [--to docs/evidence]

For each folder: NAME.json, its `table.json`; and NAME.csv, the evaluated rounds of every run (round, accuracy, losses,
curvature), so that a claim can be checked, or tested otherwise, without the runs. Nothing is computed here.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

from fedflat.runs.records import record_of

COLUMNS = ("accuracy", "loss", "train_loss", "global_train_loss", "global_lambda_max", "global_trace")


def rows(folder: Path) -> list[dict[str, object]]:
    """One dict per run and evaluated round."""
    found = []
    for path in sorted(path.parent for path in folder.glob("*/experiment.toml")):
        record = record_of(path)
        values = {name: dict(record.points(name)) for name in COLUMNS}
        for number in sorted(values["accuracy"]):
            row = {"method": record.experiment.method, "seed": record.experiment.seed, "round": number}
            found.append(row | {name: _short(points.get(number)) for name, points in values.items()})
    return found


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "evidence")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    for folder in arguments.folders:
        if (folder / "table.json").exists():
            shutil.copy(folder / "table.json", arguments.to / f"{folder.name}.json")
        with (arguments.to / f"{folder.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ("method", "seed", "round", *COLUMNS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows(folder))
        print(f"{folder.name}: {len(rows(folder))} rows")


if __name__ == "__main__":
    main()
