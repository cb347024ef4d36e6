"""Run a leaderboard: search, then the seeds; whatever is finished is kept, and what fails is noted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedflat.core import streams
from fedflat.data import Federation, load_federation
from fedflat.engine.assembly import make_setup
from fedflat.errors import FedflatError, InputError, one_line
from fedflat.experiment import Experiment
from fedflat.report.board.checks import at
from fedflat.report.board.entry import BASELINE, Entry
from fedflat.report.board.plan import Plan
from fedflat.report.board.round_time import time_rounds
from fedflat.runs.records import record_of
from fedflat.runs.series import Member, run_all, series
from fedflat.runs.sharing import locked
from fedflat.studies.study import study

Say = Callable[[str], None]


def race(plan: Plan, methods: Sequence[str], out: Path, root: str | None, say: Say) -> list[Entry]:
    """Search and run all methods, one setting after another; one entry for each method and setting."""
    checker = Checker(root)
    _check_settings(plan, checker)
    return [entry for setting in plan.settings for entry in _race_in(setting, plan, methods, out, checker, say)]


def _check_settings(plan: Plan, checker: Checker) -> None:
    """Refuse a setting that FedAvg cannot be run in, before the runs of any other setting are made."""
    for name in plan.settings:
        for experiment in (plan.searched(name, method=BASELINE), plan.setting(name, method=BASELINE)):
            with at(f'[settings."{name}"] with [experiment]'):
                if why := checker.refusal(experiment):
                    raise InputError(why)


def _race_in(setting: str, plan: Plan, methods: Sequence[str], out: Path, checker: Checker, say: Say) -> list[Entry]:
    entries, search, root = [Entry(setting, method) for method in methods], out / "search", checker.root
    say(f"{setting}: search 1 of 2, learning rates")
    _try(entries, _rates(plan), search, checker)
    say(f"{setting}: search 2 of 2, main hyper-parameters")
    _try(entries, _strengths(plan), search, checker)
    say(f"{setting}: runs on {plan.seeds} seeds")
    alive = [entry for entry in entries if entry.chosen and _fits(plan, entry, checker)]
    members = {id(entry): series(_finals(plan, entry), out) for entry in alive}
    _run([member for group in members.values() for member in group], root)
    for entry in alive:
        _collect(entry, members[id(entry)])
    say(f"{setting}: curvature of the first seed")
    measured = [entry for entry in entries if entry.records]
    _analyse(measured, plan, root)
    say(f"{setting}: time of a round")
    time_rounds(measured, checker.federation)
    return entries


class Checker:
    """Says why an experiment cannot be run, before anything is run; data that experiments share are loaded once."""

    def __init__(self, root: str | None) -> None:
        self.root, self._federations = root, dict[tuple[object, ...], Federation]()

    def federation(self, e: Experiment) -> Federation:
        """The data of an experiment."""
        source = (e.data, e.partition, e.clients, e.seed, self.root, e.augment, e.local_holdout)
        if source not in self._federations:
            self._federations[source] = load_federation(*source)
        return self._federations[source]

    def refusal(self, e: Experiment) -> str:
        """The error that `fedflat.run` would raise; empty if there is none."""
        federation = self.federation(e)
        try:
            with streams.isolated(e.seed, "check"):
                make_setup(e, federation=federation)
        except FedflatError as error:
            return one_line(error)
        return ""


Choices = Callable[[Entry], list[Experiment]]


def _rates(plan: Plan) -> Choices:
    def choices(entry: Entry) -> list[Experiment]:
        method = plan.start(entry.method)
        return [plan.searched(entry.setting, method=method, lr=lr) for lr in plan.search["lr"]]

    return choices


def _strengths(plan: Plan) -> Choices:
    def choices(entry: Entry) -> list[Experiment]:
        best, start = entry.chosen, plan.start(entry.method)
        return (
            [best.replace(method=method) for method in plan.variants(entry.method) if method != start] if best else []
        )

    return choices


def _try(entries: Iterable[Entry], choices: Choices, out: Path, checker: Checker) -> None:
    """Run what an entry may choose from, and let it choose the best on the validation samples."""
    alive = [entry for entry in entries if not entry.failure]
    members: dict[int, list[Member]] = {}
    for entry in alive:
        wanted = choices(entry)
        refusals = {e: checker.refusal(e) for e in wanted}
        members[id(entry)] = series([e for e in wanted if not refusals[e]], out)
        if entry.chosen is None and all(refusals.values()):
            entry.failure = next(iter(refusals.values()))
    _run([member for group in members.values() for member in group], checker.root)
    for entry in alive:
        best = max(entry.searched.values(), default=-1.0)
        for member in members[id(entry)]:
            value = record_of(member.folder).tail() if member.finished else None
            if value is not None:
                entry.searched[f"{member.experiment.method}, lr {member.experiment.lr:g}"] = value
                if value > best:
                    best, entry.chosen = value, member.experiment
        if entry.chosen is None and not entry.failure:
            reasons = [member.failure for member in members[id(entry)] if member.failure]
            entry.failure = f"no run of the search ended: {reasons[0]}" if reasons else "no run of the search ended"


def _fits(plan: Plan, entry: Entry, checker: Checker) -> bool:
    """Whether the full runs are possible; otherwise the entry says why not."""
    entry.failure = entry.failure or checker.refusal(_finals(plan, entry)[0])
    return not entry.failure


def _finals(plan: Plan, entry: Entry) -> list[Experiment]:
    assert entry.chosen is not None
    chosen = {"method": entry.chosen.method, "lr": entry.chosen.lr}
    return [plan.setting(entry.setting, **chosen, seed=seed) for seed in range(plan.seeds)]


def _run(members: Sequence[Member], root: str | None) -> None:
    once = list({member.folder: member for member in members}.values())
    if once:
        run_all(once, root=root)
    failures = {member.folder: member.failure for member in once}
    for member in members:
        member.failure = failures[member.folder]


def _collect(entry: Entry, members: Sequence[Member]) -> None:
    entry.records = [record_of(member.folder) for member in members if member.finished]
    failed = [member for member in members if member.failure]
    if failed:
        seeds = ", ".join(str(member.experiment.seed) for member in failed)
        entry.failure = f"seed {seeds}: {failed[0].failure}"


def _analyse(entries: Sequence[Entry], plan: Plan, root: str | None) -> None:
    """Curvature of the first seeds' models, unless the run folders have it."""

    def there(entry: Entry) -> bool:
        path = _curvature(entry)
        return path.exists() and json.loads(path.read_text()).get("samples") == plan.samples

    for entry in locked(entries, lambda entry: entry.folder, there):
        try:
            study([entry.folder], ["curvature"], root=root, samples=plan.samples, workers=0, device="cpu")
        except FedflatError as error:
            entry.failure = entry.failure or f"no curvature: {one_line(error)}"
    for entry in filter(there, entries):
        entry.curvature = json.loads(_curvature(entry).read_text())["headline"]


def _curvature(entry: Entry) -> Path:
    return entry.folder / "analysis" / "curvature.json"
