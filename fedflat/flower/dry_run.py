"""What a client of a method sends, found by having one train on made-up samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedflat.core.tensors import State, copied
from fedflat.core.views import Update
from fedflat.data import Federation
from fedflat.engine.jobs import train
from fedflat.engine.setup import Broadcast, Job, Setup
from fedflat.errors import RunError
from fedflat.flower.data_summary import Blank, DataSummary
from fedflat.flower.messages import Expected, tensors_of
from fedflat.flower.validation import form_of

FEW = 2  # samples, of which one batch is made: one alone would have no statistics


def dry_run(setup: Setup, broadcast: Broadcast, job: Job, data: DataSummary) -> Expected:
    """What comes back from a client that trains for the first time, and from one that has trained before.

    `steps` is the number of steps where the experiment asks for one: a method may have several trajectories.
    """
    blank = Blank(FEW, data, data.classes)
    federation = Federation([blank] * len(setup.federation), classes=setup.federation.classes if data.classes else None)
    small = setup.experiment.replace(batch_size=FEW, local_steps=1)
    stage = replace(setup, experiment=small, federation=federation)
    first = _trained(stage, broadcast, job, {})
    second = _trained(stage, broadcast, job, first.states)
    form, metrics = form_of(tensors_of(first), tensors_of(second)), frozenset({*first.metrics, *second.metrics})
    return Expected(form, metrics, steps=max(1, first.steps, second.steps))


def _trained(stage: Setup, broadcast: Broadcast, job: Job, states: Mapping[str, State]) -> Update:
    update = train(stage, broadcast, replace(job, states=copied(states)))
    if update.failure is not None:
        raise RunError(f"the method failed on made-up samples, so that nobody can be asked to run it: {update.failure}")
    return update
