"""The options of `fedflat run` that become callbacks: when to stop, and which trackers to use."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fedflat.cli.parser import Parser
from fedflat.errors import InputError

if TYPE_CHECKING:
    from fedflat.runs.callbacks import Callback
    from fedflat.runs.result import Run

Number = TypeVar("Number", int, float)
STOP_AT = "stop when a metric has reached a value: accuracy=0.8, loss=0.5, or 0.8 for the leading metric"
PATIENCE = "stop after N evaluations without a better leading metric, or without a better METRIC, such as loss=20"
TRACK = "also log to these trackers, separated by commas: tensorboard, mlflow, wandb, \"wandb(mode='online')\""


def add_callbacks(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("--stop-at", metavar="[METRIC=]X", help=STOP_AT)
    parser.add_argument("--patience", metavar="[METRIC=]N", help=PATIENCE)
    parser.add_argument("--track", metavar="LIST", default="", help=TRACK)


def callbacks_of(arguments: argparse.Namespace) -> list[Callback]:
    """New callbacks, as the options ask for."""
    from fedflat.runs.callbacks import EarlyStopping, TargetStopping

    found: list[Callback] = []
    if arguments.stop_at is not None:
        metric, target = _rule("--stop-at", arguments.stop_at, float)
        found.append(TargetStopping(metric, target, strict=True))
    if arguments.patience is not None:
        metric, patience = _rule("--patience", arguments.patience, int)
        found.append(EarlyStopping(metric, patience, strict=True))
    if arguments.track:
        from fedflat.tracking import trackers

        found += trackers(arguments.track)
    return found


def metrics_needed(callbacks: Sequence[Callback]) -> list[str]:
    """The metrics by which callbacks stop a run."""
    from fedflat.runs.callbacks import Stopping

    return [callback.metric for callback in callbacks if isinstance(callback, Stopping) and callback.metric]


def _rule(option: str, text: str, number: Callable[[str], Number]) -> tuple[str, Number]:
    metric, _, value = text.rpartition("=")
    try:
        return metric, number(value)
    except ValueError:
        raise InputError(f"{option} takes a number, or metric=number, not {text!r}") from None


def track_finished(run: Run, callbacks: Sequence[Callback]) -> None:
    """Let the trackers copy a run that was already finished and so called no callback."""
    from fedflat.tracking import Tracker

    for callback in callbacks:
        if isinstance(callback, Tracker) and not callback.started:
            callback.copy(run)
