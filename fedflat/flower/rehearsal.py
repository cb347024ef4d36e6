"""What a client of a method sends, found by having one train on made-up samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedflat.backends.base import Broadcast, Order
from fedflat.client import train
from fedflat.data import Federation
from fedflat.errors import RunError
from fedflat.flower.facts import Blank, Facts
from fedflat.flower.letters import carried
from fedflat.flower.wire import Form, form_of
from fedflat.method import State, Update, copied
from fedflat.task import Task

FEW = 2  # samples, of which one batch is made: one alone would have no statistics


@dataclass(frozen=True)
class Expected:
    """The tensors and the figures that a client may send."""

    form: Form
    figures: frozenset[str] = frozenset()


def rehearse(task: Task, broadcast: Broadcast, order: Order, facts: Facts) -> Expected:
    """What comes back from a client that trains for the first time, and from one that has trained before."""
    blank = Blank(FEW, facts, facts.classes)
    federation = Federation([blank] * len(task.federation), classes=task.federation.classes if facts.classes else None)
    small = task.experiment.replace(batch_size=FEW, local_steps=1)
    stage = replace(task, experiment=small, federation=federation)
    first = _trained(stage, broadcast, order, {})
    second = _trained(stage, broadcast, order, first.states)
    return Expected(form_of(carried(first), carried(second)), frozenset({*first.figures, *second.figures}))


def _trained(stage: Task, broadcast: Broadcast, order: Order, states: Mapping[str, State]) -> Update:
    update = train(stage, order.job(broadcast, copied(states)))
    if update.failure is not None:
        raise RunError(f"the method failed on made-up samples, so that nobody can be asked to run it: {update.failure}")
    return update
