"""Which process computes on which device, and what to say where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedflat.core.compiled import compiled
from fedflat.core.devices import accelerated, kind_of
from fedflat.core.forked import gradients_survive
from fedflat.core.processes import available_cores
from fedflat.engine.setup import Setup
from fedflat.errors import RunError


def placed(setup: Setup, device: torch.device) -> Setup:
    """The setup on a device, in the process that computes there."""
    kind_of(device).prepare(device, setup.experiment.precision)
    with explaining_memory(setup, "the data and the model"):
        here = setup.on(device)
    if setup.experiment.compile != "none":
        # In the process that computes: a compiled network cannot be forked.
        here.model.compute_by(compiled(here.model.module, setup.experiment.compile))
    return here


def processes(setup: Setup) -> int:
    """How many worker processes a run has on this machine."""
    each = setup.experiment.workers or kind_of(setup.devices[0]).workers_per_device or available_cores()
    return each * len(setup.devices)


def fork_hindrance(devices: Sequence[torch.device]) -> str:
    """Why workers forked from this process could not compute on these devices; empty if they can."""
    name = devices[0].type
    if not kind_of(devices[0]).can_fork():
        return f"workers cannot use {name} if this process has; keep model and data on the CPU before the run"
    if accelerated() and not gradients_survive():
        return "this process has computed gradients, after which PyTorch cannot fork; start the run in a fresh process"
    return ""


@contextmanager
def explaining_memory(setup: Setup, what: str) -> Iterator[None]:
    """Turn a device's lack of memory inside the block into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        experiment, device = setup.experiment, setup.device
        memory = kind_of(device).memory(device)
        free = f", {memory[0] >> 20} of {memory[1] >> 20} MiB are free" if memory else ""
        raise RunError(
            f"{device} has too little memory for {what}: {setup.model.size} parameters of "
            f"{type(setup.model.module).__name__}, batch_size={experiment.batch_size}{free}. Lower batch_size; or "
            "continue from the last checkpoint with fewer workers, or with data_share=0: data then stay off the device"
        ) from error
