"""The plan of a leaderboard, from a TOML file: which methods, in which settings, with which search.

Keys of the file:
- `title`, `seeds` (how many), `search_seed`, `samples` (for Hessians), `experiment` (fields that all runs share).
- `settings`: by name, further fields of the experiment.
- `search`: `rounds`, and `lr`, the learning rates to try.
- `values`: by `part.field`, the values to try of a part's main hyper-parameter. Without an entry: the first field that
  is a positive number, at a third of its default, at the default and at three times it.
- `combinations`: sums of parts to rank beside the single ones.
- `leave_out`: by part, why it is not ranked. Methods without a common model are left out anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedflat.core.method import Method
from fedflat.core.part import Part
from fedflat.core.registry import known_parts
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import Experiment, check_names, read_toml
from fedflat.parts import SUMS
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
        for values in (self.experiment, *self.settings.values()):
            check_names(dict(values))
        for name, wanted in (("rounds", int), ("lr", list)):
            if not isinstance(self.search.get(name), wanted) or not self.search[name]:
                raise InputError(
                    f"[search] of a leaderboard needs {name!r}, {'a number' if wanted is int else 'a list'}"
                )
        for name in self.search:
            if name not in ("rounds", "lr"):
                raise UnknownNameError("entry of [search]:", name, ("rounds", "lr"))
        if not self.settings:
            raise InputError("a leaderboard needs at least one setting in [settings]")
        if self.seeds < 1:
            raise InputError(f"seeds must be 1 or more, got {self.seeds}")
        for name in self.values:
            part, _, own = name.partition(".")
            if part not in (*known_parts(), *SUMS):
                raise UnknownNameError("part in [values]:", part, (*known_parts(), *SUMS))
            if own not in _defaults(part):
                raise UnknownNameError(f"field of {part!r} in [values]:", own, _defaults(part))

    def methods(self, added: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
        """All methods to rank, FedAvg first. added: the user's own; only: the names to keep beside FedAvg."""
        every = [name for name, part in known_parts().items() if not self.why_not(part)]
        found = list(dict.fromkeys([BASELINE, *every, *SUMS, *self.combinations, *added]))
        for method in found:
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

    def why_not(self, part: type[Part]) -> str:
        """Why a part is not ranked by itself; empty if it is."""
        return NO_COMMON_MODEL if part.judged_by == "clients" else self.leave_out.get(part.name, "")

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
        """The field of a call to search, and its values; no name if there is none or the call gives values itself."""
        if call.args or call.kwargs:
            return "", ()
        for name, values in self.values.items():
            part, _, own = name.partition(".")
            if part == call.name:
                return own, values
        for name, usual in _defaults(call.name).items():
            if isinstance(usual, float) and usual > 0:
                return name, [float(f"{usual / 3:.2g}"), usual, float(f"{usual * 3:.2g}")]
        return "", ()


def _defaults(name: str) -> dict[str, Any]:
    """The fields of a part or of a named sum, and their defaults."""
    made = known_parts().get(name) or SUMS.get(name)
    return {} if made is None else {key: value.default for key, value in inspect.signature(made).parameters.items()}


def _with(calls: Sequence[Call], place: int, name: str, value: Any) -> str:
    call = calls[place]
    changed = Call(call.name, call.args, {**call.kwargs, name: value})
    return "+".join(str(changed if number == place else other) for number, other in enumerate(calls))


def _valid(method: str) -> bool:
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
    return Plan(**values)
