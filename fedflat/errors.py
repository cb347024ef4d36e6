"""Every error the library raises on purpose, so that callers can tell a bad input from a failed run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedflatError(Exception):
    """Base of all errors raised on purpose; its text is meant for a person and says what to do."""


class InputError(FedflatError, ValueError):
    """Something the user gave cannot be used (exit status 2 on the command line)."""


class UnknownNameError(InputError):
    """A name that is not registered; the text offers the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        near = nearest(name, known := sorted(known))
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"unknown {kind} {name!r}: {hint}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most like this one, whatever the case of letters; None where none is."""
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=cutoff)
    return spelt[near[0]] if near else None


class PartitionError(InputError):
    """The data cannot be divided as asked."""


class DataError(InputError):
    """A data file is missing, truncated or not what its name says; nothing was deleted."""


class CheckpointError(InputError):
    """A run folder cannot be resumed or read: it is damaged, or belongs to another experiment."""


class RunError(FedflatError):
    """A run failed after it had started (exit status 1); its last good checkpoint stays."""


class ClientError(RunError):
    """Local training raised. Carries where: round (from 1), client, local step (from 0), and the traceback."""

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
    """A round has fewer updates than are needed to combine them; in a deployment it is void, and others follow."""


class RoundLostError(RunError):
    """No client of a round returned a usable update."""


class InterruptedRunError(FedflatError):
    """The run was stopped by a signal after writing a checkpoint (exit status 130)."""


def one_line(error: BaseException) -> str:
    """What an error says, on one line; of a client's, without the traceback."""
    return " ".join(str(error.args[0] if error.args else error).split())
