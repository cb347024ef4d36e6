"""The optimisers by name, and the one that an experiment chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fedflat.core.optimizers import SGD, SHARED, Adagrad, Adam, AdamW, Optimizer, RMSprop
from fedflat.errors import InputError
from fedflat.experiment import Experiment
from fedflat.specs import build, parse

OPTIMIZERS: dict[str, type[Optimizer]] = {kind.name: kind for kind in (SGD, Adam, AdamW, RMSprop, Adagrad)}
"""The optimisers by name."""


def optimizer_of(e: Experiment) -> Optimizer:
    """The experiment's optimiser, with the fields that the two share filled in.

    Raises:
        InputError: An unknown name or field, a value out of range, or fields that contradict each other.
    """
    return _made(e.optimizer, e.momentum, e.nesterov, e.weight_decay)


@cache
def _made(text: str, *shared: float) -> Optimizer:
    optimizer: Optimizer = build("optimizer", parse(text), OPTIMIZERS)
    filled: dict[str, float] = {}
    for name, value in zip(SHARED, shared, strict=True):
        default, known = getattr(Experiment, name), hasattr(optimizer, name)
        own = getattr(optimizer, name, default)  # an optimiser without momentum is one with the default, none
        if own is not None and value not in (own, default):
            remedy = f"give {name} once" if known else f"leave {name} at {default}"
            raise InputError(f"{name}={value} does not fit optimizer={text!r}: {remedy}")
        if known:
            filled[name] = value if own is None else own
    made: Optimizer = replace(optimizer, **filled)
    if getattr(made, "nesterov", False) and not getattr(made, "momentum", 0.0):
        raise InputError("nesterov needs a momentum above 0")
    return made
