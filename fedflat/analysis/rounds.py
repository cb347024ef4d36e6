"""How accuracy went over the rounds of a run, for the common test data and for every client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedflat.analysis.behaviour import forgetting
from fedflat.analysis.results import plain
from fedflat.errors import InputError
from fedflat.report.records import Record, record_of

if TYPE_CHECKING:
    from fedflat.result import Run

TAIL = 100  # rounds in a tail average


@dataclass(frozen=True, eq=False)
class AccuracyOverRounds:
    """Accuracy over the rounds of a run, nan where nothing was measured.

    curve: (round, accuracy) on the common test data, where it was measured; final, best, best_round, tail: of it; tail
    is the mean over the last 100 rounds.
    rounds, clients, by_client: accuracy of the common model (of a client's own where there is none) on each client's
    test data, one row a round in which clients were evaluated, one column a client. forgotten: how far each client
    lies below its best of the earlier rounds at last.
    """

    final: float
    best: float
    best_round: int | None
    tail: float
    curve: list[tuple[int, float]]
    rounds: list[int]
    clients: list[int]
    by_client: Tensor
    forgotten: Tensor

    @property
    def mean_forgotten(self) -> float:
        """Mean over the clients; nan where they were evaluated less than twice."""
        return float(self.forgotten.nanmean()) if len(self.rounds) > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists only."""
        return plain(self, "mean_forgotten")

    def plot(self) -> Any:
        """A matplotlib figure: the curve, and accuracy of each client over the rounds as a map where there is any."""
        from fedflat.analysis.plots import rounds_figure

        return rounds_figure(self)


def accuracy_over_rounds(run: Run | Record | str | Path) -> AccuracyOverRounds:
    """Accuracy over the rounds of a run or of a run folder, as it was recorded.

    Clients are there where a run evaluates them: `evaluate_clients`, or `--watch interference`.
    """
    record = record_of(run)
    points, best = record.points("accuracy"), record.best()
    rounds, clients, table = _by_client(record)
    if not points and not rounds:
        raise InputError("no accuracy was recorded: the run has no test data, or has not come to its first evaluation")
    late = [value for round, value in points if round > record.rounds - TAIL]
    return AccuracyOverRounds(
        final=points[-1][1] if points else math.nan,
        best=best[1] if best else math.nan,
        best_round=best[0] if best else None,
        tail=fmean(late) if late else math.nan,
        curve=points,
        rounds=rounds,
        clients=clients,
        by_client=table,
        forgotten=forgetting(table)[-1] if rounds else table.new_empty(0),
    )


def _by_client(record: Record) -> tuple[list[int], list[int], Tensor]:
    rows = [row for row in record.evaluations if not row["new"]]
    rounds, clients = (sorted({int(row[name]) for row in rows}) for name in ("round", "client"))
    table = torch.full((len(rounds), len(clients)), torch.nan, dtype=torch.float64)
    row_of, column_of = ({name: place for place, name in enumerate(names)} for names in (rounds, clients))
    for row in rows:
        value = row["personal"] if row["common"] is None else row["common"]
        if value is not None:
            table[row_of[row["round"]], column_of[row["client"]]] = value
    return rounds, clients, table
