"""What was recorded on the way with `--watch`: how the clients' models part, and what they are like."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedflat.report.page.markup import Html, Section
from fedflat.report.page.page import Page, beside
from fedflat.report.page.run_groups import Points, spread, thinned
from fedflat.runs.json_files import read_rows
from fedflat.runs.records import Record

ROUNDS = {  # of a round, in its metrics: title and logarithmic or not
    "drift_diversity": ("Diversity of the updates (1: all alike)", False),
    "global_feature_norm": ("Length of the global model’s outputs, mean over all clients", False),
    "global_feature_norm_std": ("… and its deviation between the clients", False),
    "consistency_centred": ("Distance of the updates from their mean, squared", True),
}
CLIENTS = {  # of a client, in its row
    "cosine": ("Cosine of a client’s model to the one received", False),
    "lambda_max": ("λ max of the clients’ models on their own data", True),
    "gsnr_mean": ("Gradient signal over noise, mean over the weights", True),
    "feature_norm": ("Length of the clients’ outputs", False),
    "norm": ("Length of the clients’ weights", False),
}


def watched(page: Page) -> Section | None:
    """Curves of whatever observers recorded."""
    rows = [_client_rows(record) for record in page.records]
    found: list[tuple[tuple[str, bool], Sequence[Points]]] = [
        *((look, [record.points(name) for record in page.records]) for name, look in ROUNDS.items()),
        *((look, [_means(of_run, name) for of_run in rows]) for name, look in CLIENTS.items()),
    ]
    drawn = [plot for (title, log), points in found if (plot := _plot(page, title, log, points))]
    how = (
        "Means over the clients of a round: models that stay close (low diversity, cosine near 1) and flat (low λ max) "
        "average well; a high signal over noise means that samples agree on where to go."
    )
    body = [page.legend(), beside(*drawn)]
    return Section("watched", "What went on at the clients", how, body, "Watched") if drawn else None


def _plot(page: Page, title: str, log: bool, points: Sequence[Points]) -> Html | None:
    """One curve per group. points: one curve per run, in the order of the page's records."""
    places = {id(record): place for place, record in enumerate(page.records)}
    found = [(group, spread([points[places[id(record)]] for record in group.records])) for group in page.groups]
    series = [group.series(**thinned(curve)) for group, curve in found if curve]
    return page.over_rounds(title, series, {"log": log}) if series else None


def _client_rows(record: Record) -> list[dict[str, Any]]:
    return read_rows(record.path / "clients.jsonl") if record.path else []


def _means(rows: list[dict[str, Any]], name: str) -> Points:
    """Mean of a figure over the clients of each round that has it."""
    table: dict[int, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            table.setdefault(int(row["round"]), []).append(float(row[name]))
    return [(round, fmean(values)) for round, values in sorted(table.items())]
