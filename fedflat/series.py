"""Several experiments one after another, each in a folder of its own; what is finished is not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat import streams
from fedflat.assembly import make_task
from fedflat.callbacks import Callback
from fedflat.data import load_federation
from fedflat.errors import FedflatError, InputError, InterruptedRunError, one_line
from fedflat.experiment import Experiment
from fedflat.naming import default_out
from fedflat.participation import participants
from fedflat.report.progress import Board, Overall
from fedflat.report.records import PLAN, Record, labels
from fedflat.report.terminal import say
from fedflat.runner import run
from fedflat.store import write_atomically


@dataclass
class Member:
    """One experiment of a series and its folder.

    preset: name of the one that it was made from, if any. failure: what went wrong while it ran, if anything did.
    """

    experiment: Experiment
    folder: Path
    preset: str = ""
    failure: str = ""

    @property
    def finished(self) -> bool:
        """Whether the folder holds this run with all its rounds."""
        with suppress(OSError, ValueError, KeyError):
            done: int = json.loads((self.folder / "checkpoint.json").read_text())["round"]
            same = not self.experiment.differences(Experiment.from_toml(self.folder / "experiment.toml"))
            return same and done >= self.experiment.rounds
        return False


def series(experiments: Iterable[Experiment], out: str | Path, preset: str = "") -> list[Member]:
    """Experiments, each once, with the folders below `out` that belong to them."""
    return [Member(e, Path(out) / default_out(e).name, preset) for e in dict.fromkeys(experiments)]


def run_all(
    members: Sequence[Member],
    *,
    root: str | Path | None = None,
    progress: bool = True,
    callbacks: Callable[[], Sequence[Callback]] = list,
    **options: Any,
) -> Sequence[Member]:
    """Run what is not finished, with a board of bars where `progress` is wanted.

    callbacks: makes those of a run. Further options are those of `fedflat.run`. Everything is checked first, so that an
    `InputError` means that nothing was run. A run that fails later, because it diverged for one, is noted in `failure`,
    and the others go on.
    """
    waiting = [(member, name) for member, name in zip(members, _names(members), strict=True) if not member.finished]
    watching = {name: options[name] for name in ("watch", "watch_every") if name in options}
    check([member.experiment for member, _ in waiting], root, **watching)
    before = len(members) - len(waiting)
    if before and progress:
        say(f"{before} of {len(members)} runs were finished earlier")
    with Board(single=len(members) == 1) if progress else nullcontext() as board:
        overall = Overall(board, [member.experiment.rounds for member, _ in waiting], before) if board else None
        for member, name in waiting:
            _write_plan(members)
            watchers = [board.watch(name, member.experiment.rounds), overall] if board and overall else []
            _run(member, [*callbacks(), *watchers], root=root, **options)
    if waiting:
        _write_plan(members)
    return members


def _names(members: Sequence[Member]) -> list[str]:
    """What to call the members where their progress is shown: number, method, and what else tells them apart."""
    found = labels([Record(member.experiment, []) for member in members])
    return [f"{place}/{len(members)} {label}" for place, label in enumerate(found, start=1)]


def _write_plan(members: Sequence[Member]) -> None:
    """Tell whoever watches the folder of the series which runs there are to be, and which of them have failed."""
    folder, runs = members[0].folder.parent, {member.folder.name: member.failure for member in members}
    try:
        write_atomically(folder / PLAN, (json.dumps({"runs": runs}, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{folder} cannot hold the runs: {error.strerror}; choose another with --out") from None


def check(experiments: Iterable[Experiment], root: str | Path | None = None, **watching: Any) -> None:
    """Refuse, before anything is run, what `fedflat.run` would refuse. Data are read once for all that share them."""
    shared: dict[tuple[Any, ...], list[Experiment]] = {}
    for e in experiments:
        shared.setdefault((e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout), []).append(e)
    for source, group in shared.items():
        federation = load_federation(*source)
        for e in group:
            with streams.isolated(e.seed, "check"):
                task = make_task(e, federation=federation, **watching)
                participants(e.participation, task.clients, e.seed)


def _run(member: Member, callbacks: Sequence[Callback], **options: Any) -> None:
    try:
        run(member.experiment, out=member.folder, preset=member.preset, progress=False, callbacks=callbacks, **options)
    except InterruptedRunError:
        raise
    except FedflatError as error:
        member.failure = one_line(error)
