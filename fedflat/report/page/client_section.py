"""How the clients fare: the distribution of their accuracies, and how they change from round to round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from fedflat.core.curves import written
from fedflat.core.fairness import Fairness
from fedflat.report.page.markup import Html, Section, folded, table
from fedflat.report.page.page import Page, beside, client_name
from fedflat.report.page.run_groups import Group
from fedflat.runs.records import Record, lead_of
from fedflat.words import percent

LISTED = 200  # clients in a table at most
ROWS = 60  # clients in a map at most
COLUMNS = 120  # evaluations in a map at most


def distribution(page: Page) -> Section | None:
    """Histograms of the clients' accuracies."""
    found = [(group, [own for r in group.records if (own := r.client_accuracies()[0])]) for group in page.groups]
    series = [_histogram(group, runs) for group, runs in found if runs]
    if not series:
        return None
    lead = written(lead_of(page.records))
    how, body = f"Each client’s {lead} on its own test data, mean over the seeds.", list[str]()
    if page.form == "percent":
        how = (
            f"Bars count clients by their {lead} on their own test data, all seeds together. A tail to the left means "
            "clients whom the model serves badly. The solid mark is the mean, the dotted ones lowest and highest 5 %."
        )
        drawn = page.draw("histogram", f"Clients by {lead}", {"series": series}, titled=False)
        body = [page.legend(), drawn]
    return Section("clients", "How the clients fare", how, [*body, _by_name(page)], "Clients")


def _by_name(page: Page) -> Html:
    """A table of the clients; of many, only those who fare worst."""
    scores: dict[int, dict[int, list[float]]] = {}
    for group in page.groups:
        for client, value in _last_scores(group):
            scores.setdefault(client, {}).setdefault(group.place, []).append(value)
    means = {client: {place: fmean(each) for place, each in found.items()} for client, found in scores.items()}
    sign = -1 if page.falls else 1
    worst = sorted(means, key=lambda client: (sign * fmean(means[client].values()), client))
    groups = [group for group in page.groups if any(group.place in found for found in means.values())]
    first, sizes = page.records[0], _sizes(page.records[0])
    rows = [
        [client_name(first, client), *([str(sizes[client])] if sizes else [])]
        + [page.shown(means[client].get(group.place)) for group in groups]
        for client in sorted(worst[:LISTED])
    ]
    heads = ["client", *(["training samples"] if sizes else []), *(group.label for group in groups)]
    which = (
        f"The {LISTED} clients who fare worst, of {len(means)}" if len(means) > LISTED else f"All {len(means)} clients"
    )
    return folded(which, table(heads, rows, "Clients", look="numbers"))


def _last_scores(group: Group) -> Iterator[tuple[int, float]]:
    """(client, value) at the last evaluation of every run."""
    for record in group.records:
        rows = [row for row in record.evaluations if not row["new"]]
        for row in rows:
            if row["round"] == rows[-1]["round"] and (value := _own(row)) is not None:
                yield int(row["client"]), value


def _sizes(record: Record) -> list[int]:
    """Training samples per client, where the run folder tells them of all."""
    held = record.file("partition.json")
    counts = held.get("counts", []) if len(held.get("shown", [])) == held.get("clients") else []
    return [sum(row) for row in counts]


def _histogram(group: Group, runs: list[list[float]]) -> dict[str, Any]:
    """Counts of all seeds together; mean and tails as means over the seeds, as in the headline."""
    each, together = [Fairness.of(run) for run in runs], Fairness.of(value for run in runs for value in run)
    marks = {name: fmean(getattr(one, name) for one in each) for name in ("mean", "low5", "top5")}
    note = (
        f"mean {percent(marks['mean'])}, lowest 5 % {percent(marks['low5'])}, highest 5 % {percent(marks['top5'])}, "
        f"{len(together.accuracies)} clients"
    )
    return group.series(counts=together.histogram(), note=note, **marks)


def interference(page: Page) -> Section | None:
    """Accuracy of every client at every evaluation, as a map."""
    maps = [(group, record) for group in page.groups if (record := _first(group))]
    if not maps:
        return None
    if page.form != "percent":
        return None
    least = min(value for _, record in maps for row in record.evaluations if (value := _own(row)) is not None)
    drawn = beside(*(_map(page, group, record, math.floor(10 * least) / 10) for group, record in maps))
    how = (
        "There is one row per client and one column per evaluation; bright is accurate. Rows that flicker belong to "
        "clients whose knowledge is overwritten by that of others. “Forgotten” is how far the clients are below their "
        "best, on average."
    )
    return Section("interference", "Who is forgotten when", how, [drawn], "Interference")


def _first(group: Group) -> Record | None:
    """The first run of a group whose clients were evaluated more than once."""
    return next((r for r in group.records if len({row["round"] for row in r.evaluations}) > 1), None)


def _own(row: dict[str, Any]) -> float | None:
    """The accuracy of a client's own model, or of the common one where it has no other."""
    value = row["common"] if row["personal"] is None else row["personal"]
    return None if value is None else float(value)


def _map(page: Page, group: Group, record: Record, low: float) -> str:
    table: dict[int, dict[int, float]] = {}
    for row in record.evaluations:
        if not row["new"] and (value := _own(row)) is not None:
            table.setdefault(int(row["client"]), {})[int(row["round"])] = value
    rounds = sorted({round for scores in table.values() for round in scores})
    forgotten = fmean(max(scores.values()) - scores[max(scores)] for scores in table.values())
    clients, columns = sorted(table)[:: -(-len(table) // ROWS)], rounds[:: -(-len(rounds) // COLUMNS)]
    label = f"{group.label}, seed {record.experiment.seed}: forgotten {percent(forgotten)}"
    values = [[table[client].get(round) for round in columns] for client in clients]
    names = {"rows": [client_name(record, client) for client in clients], "columns": [str(round) for round in columns]}
    scale = {"ramp": "heat", "low": low, "high": 1.0, "form": "percent"}
    axes = {"x": "round", "y": "client", "value": written(lead_of(page.records))}
    return page.draw("heat", label, {"values": values, **names, **scale, **axes})
