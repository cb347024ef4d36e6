"""Options of `fedflat run` that become callbacks: when to stop, and where to track."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fedflat.commands.parser import Parser
from fedflat.errors import InputError

if TYPE_CHECKING:
    from fedflat.callbacks import Callback
    from fedflat.result import Run

Number = TypeVar("Number", int, float)
STOP_AT = "stop when a metric has reached a value: accuracy=0.8, loss=0.5, or 0.8 for the accuracy"
PATIENCE = "stop after so many evaluations without a better accuracy; loss=20 for another metric"
TRACK = "copy to tensorboard, mlflow, wandb, with commas between them; as in \"wandb(mode='online')\""


def add_callbacks(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("--stop-at", metavar="[METRIC=]X", help=STOP_AT)
    parser.add_argument("--patience", metavar="[METRIC=]N", help=PATIENCE)
    parser.add_argument("--track", metavar="LIST", default="", help=TRACK)


def callbacks_of(arguments: argparse.Namespace) -> list[Callback]:
    """The callbacks that the options ask for, new ones each time."""
    from fedflat.callbacks import EarlyStopping, TargetStopping

    found: list[Callback] = []
    if arguments.stop_at is not None:
        metric, target = _rule("--stop-at", arguments.stop_at, float)
        found.append(TargetStopping(metric, target))
    if arguments.patience is not None:
        metric, patience = _rule("--patience", arguments.patience, int)
        found.append(EarlyStopping(metric, patience))
    if arguments.track:
        from fedflat.tracking import trackers

        found += trackers(arguments.track)
    return found


def _rule(option: str, text: str, number: Callable[[str], Number]) -> tuple[str, Number]:
    metric, _, value = text.rpartition("=")
    try:
        return metric or "accuracy", number(value)
    except ValueError:
        raise InputError(f"{option} takes a number, or metric=number, not {text!r}") from None


def track_finished(run: Run, callbacks: Sequence[Callback]) -> None:
    """Let the trackers copy a run that was found finished, and so called nobody."""
    from fedflat.tracking import Tracker

    for callback in callbacks:
        if isinstance(callback, Tracker) and not callback.started:
            callback.copy(run)
