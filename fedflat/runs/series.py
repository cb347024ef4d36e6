"""Several experiments one after another, each in its own folder; finished runs are not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedflat.console import say
from fedflat.core import streams
from fedflat.core.participation import participants
from fedflat.data import load_federation
from fedflat.engine.assembly import make_setup, settled
from fedflat.engine.measuring import require_recorded
from fedflat.errors import (
    CheckpointError,
    FedflatError,
    FolderInUseError,
    InputError,
    InterruptedRunError,
    RunError,
    one_line,
)
from fedflat.experiment import Experiment, default_out
from fedflat.runs.branching import Branching, Follower, leaders
from fedflat.runs.callbacks import Callback
from fedflat.runs.display import Board, Overall
from fedflat.runs.files import write_atomically
from fedflat.runs.folder import RunFolder
from fedflat.runs.json_files import read_json
from fedflat.runs.records import PLAN, Record, labels
from fedflat.runs.runner import begin, run
from fedflat.runs.sharing import Queue


@dataclass
class Member:
    """One experiment of a series.

    Args:
        experiment: What to run.
        folder: Its run folder.
        preset: The name of the preset that the experiment was made from, if any.
        failure: The error of the run, if it failed.
    """

    experiment: Experiment
    folder: Path
    preset: str = ""
    failure: str = ""

    @property
    def finished(self) -> bool:
        """Whether the folder contains this run with all its rounds."""
        with suppress(OSError, CheckpointError, KeyError):
            done = int(read_json(self.folder / "checkpoint.json")["round"])
            same = not self.experiment.differences(Experiment.from_toml(self.folder / "experiment.toml"))
            return same and done >= self.experiment.rounds
        return False


def series(experiments: Iterable[Experiment], out: str | Path, preset: str = "") -> list[Member]:
    """The experiments, without duplicates, each with its own folder in `out`."""
    return [Member(e, Path(out) / default_out(e).name, preset) for e in dict.fromkeys(map(settled, experiments))]


def run_all(
    members: Sequence[Member],
    *,
    root: str | Path | None = None,
    progress: bool = True,
    callbacks: Callable[[], Sequence[Callback]] = list,
    needed: Sequence[str] = (),
    **options: Any,
) -> Sequence[Member]:
    """Run the members that are not finished.

    All experiments are checked first, so an `InputError` means that nothing was run. If a run fails later, for example
    because it diverged, its error is stored in `Member.failure` and the other members are run. Several processes may
    share a series: a run that another process works on is put off, and left out if that process finishes it.

    Args:
        members: See `series`.
        root: The folder of the data sets.
        progress: Whether to show progress bars.
        callbacks: Makes the callbacks of one run.
        needed: Metrics that the runs must measure.
        **options: As for `fedflat.run`.
    """
    waiting = [(member, name) for member, name in zip(members, _names(members), strict=True) if not member.finished]
    watching = {name: options[name] for name in ("metrics", "watch", "watch_every") if name in options}
    led = leaders([member.experiment for member in members])
    check([member.experiment for member, _ in waiting], root, needed, **watching)
    before = len(members) - len(waiting)
    if before and progress:
        say(f"{before} of {len(members)} runs were finished earlier")
    with Board(single=len(members) == 1) if progress else nullcontext() as board:
        earlier = sum(member.experiment.rounds for member in members if member.finished)
        rounds = [member.experiment.rounds for member, _ in waiting]
        overall = Overall(board, rounds, before, earlier) if board else None
        queue = Queue(
            waiting,
            busy=lambda pair: _busy(members, led, pair[0]),
            done=lambda pair: pair[0].finished,
            elsewhere=lambda pair: overall.elsewhere(pair[0].experiment) if overall else None,
        )
        for member, name in queue:
            _write_plan(members)
            watchers = [board.watch(name, member.experiment.rounds), overall] if board and overall else []
            branching = Branching(_followers(members, led, member), partial(begin, root=root, **watching))
            try:
                _run(member, [*callbacks(), *watchers, branching], root=root, **options)
            except FolderInUseError:
                queue.put_off((member, name))
    if waiting:
        _write_plan(members)
    return members


def _followers(members: Sequence[Member], led: Mapping[int, int], leader: Member) -> list[Follower]:
    """The members that are to begin with rounds of this one."""
    own = (members[place] for place, first in led.items() if members[first] is leader)
    return [Follower(member.experiment, member.folder, member.preset) for member in own]


def _busy(members: Sequence[Member], led: Mapping[int, int], member: Member) -> bool:
    """Whether another process works on the member, or on rounds with which it is to begin."""
    folder, first = RunFolder(member.folder), led.get(members.index(member))
    return folder.in_use or (first is not None and not folder.exists() and RunFolder(members[first].folder).in_use)


def _names(members: Sequence[Member]) -> list[str]:
    """Labels for the progress bars: number, method, and the fields in which the members differ."""
    found = labels([Record(member.experiment, []) for member in members])
    return [f"{place}/{len(members)} {label}" for place, label in enumerate(found, start=1)]


def _write_plan(members: Sequence[Member]) -> None:
    """Write the list of all runs, with the errors of those that failed, for `fedflat report --watch`."""
    folder, runs = members[0].folder.parent, {member.folder.name: member.failure for member in members}
    try:
        write_atomically(folder / PLAN, (json.dumps({"runs": runs}, indent=1) + "\n").encode())
    except RunError as error:
        raise InputError(f"{folder} cannot hold the runs: {error}; choose another with --out") from None


def check(
    experiments: Iterable[Experiment], root: str | Path | None = None, needed: Sequence[str] = (), **watching: Any
) -> str:
    """Raise the errors that `fedflat.run` would raise, before anything is run. Shared data are loaded only once.

    Args:
        experiments: What will be run.
        root: The folder of the data sets.
        needed: Metrics that the runs must measure.
        **watching: As for `fedflat.run`: `metrics`, `watch` and `watch_every`.

    Returns:
        The leading metric of the last experiment.
    """
    lead = "accuracy"
    shared: dict[tuple[Any, ...], list[Experiment]] = {}
    for e in experiments:
        shared.setdefault((e.data, e.partition, e.clients, e.seed, root, e.augment, e.local_holdout), []).append(e)
    for source, group in shared.items():
        federation = load_federation(*source)
        for e in group:
            with streams.isolated(e.seed, "check"):
                setup = make_setup(e, federation=federation, **watching)
                lead = setup.lead
                for name in needed:
                    require_recorded(setup, name)
                participants(setup.experiment.participation, setup.clients, e.seed)
    return lead


def _run(member: Member, callbacks: Sequence[Callback], **options: Any) -> None:
    try:
        run(member.experiment, out=member.folder, preset=member.preset, progress=False, callbacks=callbacks, **options)
    except (InterruptedRunError, FolderInUseError):
        raise
    except FedflatError as error:
        member.failure = one_line(error)
