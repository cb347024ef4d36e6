"""Accuracy over the rounds of a run, on the common test data and per client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.analysis.behaviour import forgetting
from fedflat.analysis.drawing import BLUE, dress
from fedflat.analysis.results import plain
from fedflat.core.curves import tail_mean
from fedflat.errors import InputError
from fedflat.extras import blank_figure
from fedflat.runs.records import Record, RunLike, record_of

TAIL = 100  # rounds in a tail average


@dataclass(frozen=True, eq=False)
class AccuracyOverRounds:
    """Accuracy over the rounds of a run; nan where nothing was measured.

    Attributes:
        final, best, best_round, tail: Last value, best value with its round, and mean over the last 100 rounds of
            `curve`.
        curve: (round, accuracy) on the common test data, where it was measured.
        rounds, clients: Rounds in which clients were evaluated, and the clients.
        by_client: Accuracy on each client's test data, one row per round, one column per client; of the common model,
            or of the client's own if there is no common one.
        forgotten: How far each client ends below its best earlier accuracy.
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
        """Mean over the clients; nan if they were evaluated less than twice."""
        return float(self.forgotten.nanmean()) if len(self.rounds) > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists only."""
        return plain(self, "mean_forgotten")

    def plot(self) -> Any:
        """Accuracy on the common test data, and per client at every evaluation."""
        figure = blank_figure(10 if self.rounds else 5, 4.2)
        axes = figure.subplots(1, 2 if self.rounds else 1, squeeze=False)[0]
        axes[0].plot([round for round, _ in self.curve], [value for _, value in self.curve], color=BLUE)
        dress(axes[0], "accuracy", "round", "")
        if self.rounds:
            drawn = axes[1].imshow(self.by_client.T.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
            figure.colorbar(drawn, ax=axes[1])
            shown = range(0, len(self.rounds), -(-len(self.rounds) // 10))
            axes[1].set_xticks(list(shown), [str(self.rounds[place]) for place in shown])
            dress(axes[1], "accuracy of the clients", "round", "client")
        return figure


def accuracy_over_rounds(run: RunLike | Record | str | Path) -> AccuracyOverRounds:
    """The recorded accuracy over the rounds of a run or a run folder.

    Clients appear if the run evaluated them: `evaluate_clients`, or `--watch interference`.
    """
    record = record_of(run)
    points, best = record.points("accuracy"), record.best()
    rounds, clients, table = _by_client(record)
    if not points and not rounds:
        raise InputError(
            "no accuracy was recorded: the run has no test data, or it has not reached its first evaluation"
        )
    tail = tail_mean(points, TAIL, record.rounds)
    return AccuracyOverRounds(
        final=points[-1][1] if points else math.nan,
        best=best[1] if best else math.nan,
        best_round=best[0] if best else None,
        tail=math.nan if tail is None else tail,
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
