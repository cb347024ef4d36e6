"""The plan of a leaderboard, from a TOML file: which methods, in which settings, with which search.

Keys of the file:
- `title`, `seeds` (how many), `search_seed`, `samples` (for Hessians), `experiment` (fields that all runs share).
- `settings`: by name, further fields of the experiment.
- `search`: `rounds`, and `lr`, the learning rates to try.
- `values`: by `part.field`, the values to try of a part's main hyper-parameter. Without an entry: the first field that
  is a positive number, at a third of its default, at the default and at three times it.
- `combinations`: methods to rank beside the single parts. A part whose main hyper-parameter is given is not searched.
- `leave_out`: by part, why it is not ranked by itself. Methods without a common model are left out anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from fedflat.core.method import Method
from fedflat.core.registry import known_parts
from fedflat.data.share import split_call
from fedflat.engine.assembly import check_spelling
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment, read_toml
from fedflat.report.board import checks
from fedflat.report.board.entry import BASELINE
from fedflat.specs import Call, parse, parse_sum

NO_COMMON_MODEL = "it is judged by the clients' own models"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to rank; the module explains the fields."""

    settings: Mapping[str, Values]
    experiment: Values
    search: Values
    title: str = "Leaderboard"
    seeds: int = 3
    search_seed: int = 100
    samples: int = 500
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    combinations: Sequence[str] = ()
    leave_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Plan).items():
            checks.check_kind(name, getattr(self, name), get_origin(kind) or kind)
        for name in ("seeds", "samples"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be 1 or more, not {getattr(self, name)}")
        checks.check_search(self.search)
        checks.check_values(self.values)
        checks.check_combinations(self.combinations)
        checks.check_left_out(self.leave_out)
        self._check_settings()

    def _check_settings(self) -> None:
        """Build every experiment once, so that a mistake in the last setting does not cost the runs of the others."""
        if not self.settings:
            raise InputError("a leaderboard needs at least one setting in [settings]")
        checks.check_fields("[experiment]", self.experiment)
        for name, values in self.settings.items():
            checks.check_fields(key := f'[settings."{name}"]', values)
            with checks.at(f"{key} with [experiment]"):
                for lr in self.search["lr"]:
                    for experiment in (self.setting(name, lr=lr), self.searched(name, lr=lr)):
                        check_spelling(experiment)
                        split_call(parse(experiment.data))

    def methods(self, added: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
        """All methods to rank, FedAvg first. added: the user's own; only: the names to keep beside FedAvg."""
        every = [name for name in checks.rankable() if not self.why_not(name)]
        found = list(dict.fromkeys([BASELINE, *every, *self.combinations, *added]))
        for method in added:
            Method.parse(method)
        for name in only:
            if name not in found:
                raise UnknownNameError("method of the leaderboard:", name, found)
        return [method for method in found if not only or method in (BASELINE, *only)]

    def within(self, names: Sequence[str]) -> Plan:
        """The same for these settings only; all of them if none is named."""
        for name in names:
            if name not in self.settings:
                raise UnknownNameError("setting of the leaderboard:", name, self.settings)
        return replace(self, settings={name: self.settings[name] for name in names}) if names else self

    def why_not(self, name: str) -> str:
        """Why a part or a famous sum is not ranked by itself; empty if it is."""
        part = known_parts().get(name)
        return NO_COMMON_MODEL if part and part.judged_by == "clients" else self.leave_out.get(name, "")

    def setting(self, name: str, **changes: Any) -> Experiment:
        """The experiment of a setting."""
        return Experiment(**{**self.experiment, **self.settings[name], **changes})

    def searched(self, name: str, **changes: Any) -> Experiment:
        """The same for the search: fewer rounds, another seed, scored on training samples that are not used."""
        base = self.setting(name, **changes)
        call = parse(base.data)
        data = str(Call(call.name, call.args, {**call.kwargs, "judge": "rest"}))
        return base.replace(data=data, rounds=self.search["rounds"], seed=self.search_seed)

    def variants(self, method: str) -> list[str]:
        """The method at up to three values of its main hyper-parameter; just itself without one."""
        calls = parse_sum(method)
        for place, call in enumerate(calls):
            name, values = self._main(call)
            if name:
                texts = [_with(calls, place, name, value) for value in values]
                return list({str(Method.parse(text)): text for text in texts if _valid(text)}.values()) or [method]
        return [method]

    def start(self, method: str) -> str:
        """The variant with which the learning rate is chosen: the middle one."""
        found = self.variants(method)
        return found[len(found) // 2]

    def _main(self, call: Call) -> tuple[str, Sequence[Any]]:
        """The field of a call to search, and its values; no name if there is none or the call gives its value."""
        name, values = self._tried(call.name)
        return ("", ()) if call.args or name in call.kwargs else (name, values)

    def _tried(self, part: str) -> tuple[str, Sequence[Any]]:
        """The main hyper-parameter of a part and the values to try of it; no name if it has none."""
        for name, values in self.values.items():
            if name.startswith(f"{part}."):
                return name.removeprefix(f"{part}."), values
        for name, usual in checks.usual_values(part).items():
            if isinstance(usual, float) and usual > 0:
                return name, [float(f"{usual / 3:.2g}"), usual, float(f"{usual * 3:.2g}")]
        return "", ()


def _with(calls: Sequence[Call], place: int, name: str, value: Any) -> str:
    call = calls[place]
    changed = Call(call.name, call.args, {**call.kwargs, name: value})
    return "+".join(str(changed if number == place else other) for number, other in enumerate(calls))


def _valid(method: str) -> bool:
    """Whether the method exists: three times a default, or a third of it, may be outside of the field's range."""
    try:
        Method.parse(method)
    except InputError:
        return False
    return True


def load_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    values, known = read_toml(path), [spec.name for spec in fields(Plan)]
    for name in values:
        if name not in known:
            raise UnknownNameError(f"entry of {path}:", name, known)
    lacking = [name for name in ("settings", "experiment", "search") if name not in values]
    if lacking:
        raise InputError(f"{path} is not a leaderboard: it lacks [{']; ['.join(lacking)}]")
    with checks.at(str(path)):
        return Plan(**values)
