"""Small real runs to report on, with everything that a report can show."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fedflat
from fedflat.studies.run_data import run_data
from fedflat.studies.study import STUDIES

WATCH = ("drift", "gsnr", "client_curvature", "feature_norms", "global_feature_norms", "interference")


def experiment(**changes: Any) -> fedflat.Experiment:
    """Ten clients that learn digits with logistic regression, in this process."""
    small = {"data": "digits", "model": "logistic", "clients": 10, "participation": "uniform(3)", "rounds": 4}
    quick = {"local_epochs": 1, "batch_size": 16, "local_holdout": 0.3, "backend": "serial"}
    return fedflat.Experiment(**(small | quick | changes))


def three_runs(folder: Path) -> list[Path]:
    """Two seeds of FedAvg and one of FedAvg with SAM, all that can be watched watched."""
    choices: list[dict[str, Any]] = [{}, {"seed": 1}, {"method": "fedavg+sam"}]
    for place, changes in enumerate(choices):
        fedflat.run(experiment(**changes), out=folder / f"run{place}", watch=WATCH, watch_every=2)
    return [folder / f"run{place}" for place in range(len(choices))]


def analysed(runs: list[Path]) -> None:
    """Make every analysis there is, as `fedflat analyze` does but for its pictures, which take longest.

    Those of one run are made of the first and the last, those that take a second of the first only.
    """
    subjects = {run: run_data(run, samples=40) for run in runs}
    for name, each in STUDIES.items():
        single = runs[:1] if name in ("density", "spectrum", "clients") else runs[::2]
        for group in [runs[: each.runs]] if each.runs > 1 else [[run] for run in single]:
            found = each.look(*(subjects[run] for run in group), seed=0)
            (group[0] / "analysis").mkdir(exist_ok=True)
            content = {"runs": [run.name for run in group], **found.to_dict()}
            (group[0] / "analysis" / f"{name}.json").write_text(json.dumps(content))


class Page(HTMLParser):
    """What a browser would find in a page: the elements, the text, the data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source, self.text = path.read_text(encoding="utf-8"), ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._last: str | None = None
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._last = dict(attrs).get("id")

    def handle_data(self, data: str) -> None:
        if self._last == "data" and data.startswith("{"):
            self.data: dict[str, Any] = json.loads(data)
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def sections(self) -> list[str]:
        return [attributes["id"] or "" for name, attributes in self.elements if name == "section"]

    def plot(self, label: str) -> dict[str, Any]:
        """The first plot whose label starts so."""
        return next(plot for plot in self.data["plots"] if plot["label"].startswith(label))
