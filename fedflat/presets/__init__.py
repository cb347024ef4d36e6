"""The papers' set-ups as presets: `preset("s003_c10", method="fedavg+asam")` is the paper's experiment.

The TOML files in this folder have one table per preset with these keys:
- `experiment`: fields of `Experiment`; `alternatives`: further values of these fields that the paper uses.
- `methods`: the hyper-parameters of the parts.
- `cases`: changes for one partition (`partition`) or for a method that has certain parts (`with`).
- `like`: another preset to start from.
- `from_code`: fields whose value is in the authors' code but not in the paper; `chosen`: fields that are in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

from fedflat.errors import UnknownNameError
from fedflat.experiment import IRRELEVANT, Experiment, check_names, read_toml
from fedflat.specs import Call, parse, parse_sum

FOLDER = Path(__file__).parent
Values = Mapping[str, Any]
Parts = Mapping[str, Values]


@dataclass(frozen=True)
class Preset:
    """One set-up of a paper.

    Attributes:
        experiment, alternatives, methods, cases, from_code, chosen: See the module.
        report: The quantity that the paper reports, as in `fedflat.report.quantities`; `reported` says it in words.
        tables: The paper's tables that use this set-up.
        seeds: Number of runs that the paper averages; 0 if it does not say.
        targets: Accuracies for which the paper counts rounds.
        notes: What else the paper leaves open.
    """

    id: str
    version: int
    paper: str
    title: str
    about: str
    experiment: Values
    report: str
    reported: str
    tables: Sequence[str] = ()
    alternatives: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    methods: Parts = field(default_factory=dict)
    cases: Sequence[Values] = ()
    seeds: int = 0
    targets: Sequence[float] = ()
    from_code: Sequence[str] = ()
    chosen: Sequence[str] = ()
    notes: Sequence[str] = ()

    def make(self, **changes: Any) -> Experiment:
        """The experiment with some fields changed; parts have the paper's values unless `method` gives others."""
        check_names(changes)
        values = {"method": "fedavg"} | dict(self.experiment) | changes
        calls = parse_sum(values["method"]) if isinstance(values["method"], str) else []
        names = {_part_name(call.name) for call in calls}
        cases = [case for case in self.cases if _fits(case, values, names)]
        for case in cases:
            values |= dict(case.get("experiment", {})) | changes
        if calls:
            values["method"] = "+".join(str(self._filled(call, cases)) for call in calls)
        return Experiment.from_dict(values)

    def record(self, experiment: Experiment) -> dict[str, Any]:
        """What a run folder records of the preset: its name, its version, and the fields that were changed.

        Changes by the preset's own `cases` do not count, nor does the seed.
        """
        ours = self.make(method=experiment.method, partition=experiment.partition).to_dict()
        ours |= {name: getattr(self.make(), name) for name in ("method", "partition")}
        fields = {name: value for name, value in experiment.to_dict().items() if name not in ("seed", *IRRELEVANT)}
        changed = [name for name, value in fields.items() if value != ours[name]]
        return {"name": self.id, "version": self.version, "changed": changed}

    def _filled(self, call: Call, cases: Sequence[Values]) -> Call:
        """A part with the paper's values for the fields that the method string does not give."""
        part = _part_name(call.name)
        ours = dict(self.methods.get(part, {}))
        for case in cases:
            ours |= case.get("methods", {}).get(part, {})
        written = {*_fields(call.name)[: len(call.args)], *call.kwargs}
        kept = {name: tuple(v) if isinstance(v, list) else v for name, v in ours.items() if name not in written}
        return Call(call.name, call.args, dict(call.kwargs) | kept)


def preset(name: str, **changes: Any) -> Experiment:
    """An experiment of a paper with some fields changed; `fedflat presets` lists the names.

    Parts of `method` have the paper's values in that set-up, unless the method string gives others: with "s003_c10",
    "fedavg+asam(rho=0.5)" is asam(rho=0.5, eta=0.2).
    """
    return load_preset(name).make(**changes)


def load_preset(name: str) -> Preset:
    """The preset of this name, with everything known about it."""
    known = all_presets()
    if name not in known:
        raise UnknownNameError("preset", name, known)
    return known[name]


@cache
def all_presets() -> dict[str, Preset]:
    """All presets by name, in the order of the papers."""
    found: dict[str, Preset] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        tables = read_toml(path)
        paper = {name: tables.pop(name) for name in ("paper", "title")}
        for name in tables:
            found[name] = Preset(id=name, **paper, **_inherited(name, tables))
    return found


def _inherited(name: str, tables: Mapping[str, Values]) -> Values:
    """A preset's table merged over the table of its `like`."""
    own = dict(tables[name])
    return merged(_inherited(own.pop("like"), tables), own) if "like" in own else own


def merged(base: Values, own: Values) -> Values:
    """Two nested tables as one: inner tables are merged recursively; otherwise the value in `own` wins."""
    tables = {key: merged(base.get(key, {}), value) for key, value in own.items() if isinstance(value, dict)}
    return {**base, **own, **tables}


def _fits(case: Values, values: Values, parts: set[str]) -> bool:
    """Whether a case applies to an experiment's values and the parts of its method."""
    partition = case.get("partition")
    return set(case.get("with", ())) <= parts and (partition is None or _same(partition, str(values["partition"])))


def _same(one: str, other: str) -> bool:
    """Whether two partitions are equal, with or without the names of their arguments."""
    pair = [parse(text) for text in (one, other)]
    first, second = ((call.name, *call.args, *call.kwargs.values()) for call in pair)
    return first == second


def _part_name(name: str) -> str:
    """The part that an alias such as "fedsam" adds to fedavg; any other name is returned as it is."""
    from fedflat.parts import ALIASES

    return ALIASES[name].name if name in ALIASES else name


def _fields(name: str) -> list[str]:
    """The fields of a part or sum in order; none for an unknown one, for which `Experiment` raises the error."""
    from fedflat.parts import SUMS, known_parts

    if name in SUMS:
        return list(signature(SUMS[name]).parameters)
    part = known_parts().get(_part_name(name))
    return [spec.name for spec in fields(part)] if part else []
