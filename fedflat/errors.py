"""The errors that the library raises on purpose: callers can tell bad input from a failed run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONG = 200  # characters of an unknown name that a message repeats


class FedflatError(Exception):
    """Base of all errors raised on purpose; the message says what to do."""


class InputError(FedflatError, ValueError):
    """The user's input cannot be used (exit status 2 on the command line)."""


class UnknownNameError(InputError):
    """A name is unknown; the message suggests the nearest known name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        name = name if len(name) <= LONG else f"{name[:LONG]}…"
        near = nearest(name, known := sorted(known))
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"unknown {kind} {name!r}: {hint}")


SYNONYMS = {  # what other libraries call a field → what it may be called here, the most likely one first
    "learning_rate": ("lr",),
    "optimiser": ("optimizer",),
    "optim": ("optimizer",),
    "epochs": ("local_epochs",),
    "steps": ("local_steps",),
    "gpu": ("device", "backend"),
    "gpus": ("device", "backend"),
    "cuda": ("device", "backend"),
    "num_clients": ("clients",),
    "num_rounds": ("rounds",),
    "num_workers": ("workers",),
    "fraction": ("participation",),
    "fraction_fit": ("participation",),
    "algorithm": ("method",),
    "strategy": ("method",),
    "network": ("model",),
    "architecture": ("model",),
    "dataset": ("data",),
    "wd": ("weight_decay",),
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that means the same or is most similar to `name`, ignoring case; None if there is none."""
    spelt = {each.lower(): each for each in known}
    for meant in SYNONYMS.get(name.lower().replace("-", "_"), ()):
        if meant in spelt:
            return spelt[meant]
    near = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=cutoff)
    return spelt[near[0]] if near else None


class PartError(InputError):
    """A slot of a part gave what the loops cannot use; the message names the part, the slot and what is expected."""


class PartitionError(InputError):
    """The data cannot be divided as requested."""


class DataError(InputError):
    """A data file is missing, truncated or not what its name says. Nothing was deleted."""


class CheckpointError(InputError):
    """A run folder cannot be resumed or read: it is damaged, or belongs to another experiment."""


class FolderInUseError(CheckpointError):
    """Another process writes to the run folder."""


class RunError(FedflatError):
    """A run failed after it had started (exit status 1). Its last good checkpoint is kept."""


class ClientError(RunError):
    """Local training of a client raised an exception. Rounds count from 1, local steps from 0."""

    def __init__(self, round: int, client: int, step: int | None, traceback: str) -> None:
        self.round, self.client, self.step, self.traceback = round, client, step, traceback
        last = traceback.strip().splitlines()[-1] if traceback.strip() else "unknown error"
        if "more than 1 value per channel" in last:
            last += " (BatchNorm cannot train on a batch of one: set drop_last, or another batch_size)"
        where = f"round {round}, client {client}" + ("" if step is None else f", step {step}")
        super().__init__(f"{where}: {last}")

    def __str__(self) -> str:
        return f"{self.args[0]}\n--- traceback of the client ---\n{self.traceback}"

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.round, self.client, self.step, self.traceback)


class TooFewError(InputError):
    """A round has fewer updates than the method needs. In a deployment the round is void and the run continues."""


class RoundLostError(RunError):
    """No client of a round returned a usable update."""


class InterruptedRunError(FedflatError):
    """The run was stopped by a signal after writing a checkpoint (exit status 130)."""


def one_line(error: BaseException) -> str:
    """The message of an error on one line, without a client's traceback."""
    return " ".join(str(error.args[0] if error.args else error).split())
