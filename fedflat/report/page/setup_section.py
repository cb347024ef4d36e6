"""What was run: the methods with their parts, who holds which data, and every setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fedflat.errors import CheckpointError, FedflatError
from fedflat.experiment import Experiment
from fedflat.report.page.markup import Html, Section, folded, formula, joined, table, tag
from fedflat.report.page.page import Page, client_name, named
from fedflat.runs.records import Record, differing, presets
from fedflat.words import listed, percent

CLIENTS = 120  # columns of a picture at most
PICTURES = 4  # divisions shown at most


def methods(page: Page) -> Section:
    """Every part of the methods once, with what it does and its formula."""
    users: dict[Described, list[str]] = {}
    for method in dict.fromkeys(record.experiment.method for record in page.records):
        for part in _parts(method):
            users.setdefault(part, []).append(method)
    ordered = sorted(users.items(), key=lambda item: -len(item[1]))
    cards = tag("div", *(_card(part, methods) for part, methods in ordered), class_="cards")
    how = (
        "A method is a sum of parts, and one loop runs them all. A formula says what a part changes. "
        "Settings that are not listed as different were the same for all runs."
    )
    return Section("methods", "What was run", how, [_facts(page), cards, _differences(page), _settings(page)], "Runs")


def _facts(page: Page) -> Html:
    """Data, clients and the preset they are from in one line."""
    shown = ("data", "partition", "clients", "participation", "model", "rounds")
    values = [(name, dict.fromkeys(str(getattr(r.experiment, name)) for r in page.records)) for name in shown]
    values += [(name, _told(page, name)) for name in ("parameters", "loss")]
    facts = [_pair(name, ", ".join(each)) for name, each in values if each]
    found = "; ".join(presets(page.records))
    return tag("dl", *facts, _pair("preset", found) if found else "", class_="facts")


def _told(page: Page, name: str) -> dict[str, None]:
    """What the runs tell of themselves beside the fields of the experiment."""
    return dict.fromkeys(str(r.details[name]) for r in page.records if name in r.details)


def _pair(name: str, *content: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", *content))


class Described(NamedTuple):
    """A part as a reader wants it: its name, its hyper-parameters, the first line about it, its formula."""

    name: str
    values: str
    about: str
    formula: str


def _card(part: Described, methods: Sequence[str]) -> Html:
    head = [tag("h3", part.name), tag("p", part.about)]
    does = [formula(part.formula)] if part.formula else []
    values = [tag("p", part.values, class_="small")] if part.values else []
    return tag("article", *head, *does, *values, tag("p", f"in {listed(methods)}", class_="small"), class_="card")


def _parts(method: str) -> list[Described]:
    """The parts of a method; none where there is no torch, or a part is not known here."""
    try:
        from fedflat.core.method import Method

        parts = Method.parse(method).parts
    except (ImportError, FedflatError):
        return []
    return [
        Described(part.name, _values(part), (type(part).__doc__ or "").partition("\n")[0], part.formula)
        for part in parts
    ]


def _values(part: Any) -> str:
    return ", ".join(f"{spec.name} = {getattr(part, spec.name)}" for spec in fields(part))


def _differences(page: Page) -> Html:
    names = [name for name in differing(page.records) if name != "seed"]
    if names in ([], ["method"]):
        return Html()
    rows = [[named(g), *(str(getattr(g.records[0].experiment, name)) for name in names)] for g in page.groups]
    return table(["runs", *names], rows, "Settings in which the runs differ", look="words")


def _settings(page: Page) -> Html:
    """Three lists to be opened: what is common to all, the runs' folders, and what they ran on."""
    different = {"seed", *differing(page.records)}
    first = page.records[0].experiment.to_dict()
    helps = {spec.name: str(spec.metadata["help"]) for spec in fields(Experiment)}
    common = [[name, str(value), helps[name]] for name, value in first.items() if name not in different]
    return joined(
        [
            folded("All settings", table(["setting", "value", "meaning"], common, "The same for all runs")),
            folded(f"Runs ({len(page.records)})", table(*_folders(page.records))),
            *_environments(page.records),
        ]
    )


def _folders(records: Sequence[Record]) -> tuple[list[str], list[list[str]], str]:
    pairs = [(record, record.experiment) for record in records]
    rows = [[str(r.path or "in memory"), e.method, str(e.seed), f"{r.rounds} of {e.rounds}"] for r, e in pairs]
    return ["folder", "method", "seed", "rounds"], rows, "Where the runs are"


def _environments(records: Sequence[Record]) -> list[Html]:
    known = records[0].file("environment.json")
    rows = [[name, str(value)] for name, value in known.items() if not isinstance(value, dict)]
    return [folded("Made with", table(["", "version"], rows, "Versions and machine of the first run"))] if rows else []


def partition(page: Page) -> Section | None:
    """Pictures of who holds what, one for each way in which the data are divided."""
    seen: dict[tuple[Any, ...], Html] = {}
    for record in page.records:
        e = record.experiment
        division = (e.data, e.partition, e.clients, e.local_holdout)
        if division not in seen and len(seen) < PICTURES and (held := record.file("partition.json")):
            seen[division] = _picture(page, record, held)
    how = (
        "There is one column per client and one row per class. The stronger the colour, the more samples. The more "
        "the columns differ, the further the clients’ models drift apart."
    )
    return Section("partition", "Who holds what", how, list(seen.values()), "Data") if seen else None


def _picture(page: Page, record: Record, held: dict[str, Any]) -> Html:
    e = record.experiment
    try:
        counts = [[int(n) for n in row] for row in held["counts"]]
        shown, clients = [int(n) for n in held["shown"]], int(held["clients"])
        step = -(-len(counts) // CLIENTS)
        kinds = sum(n > 0 for row in counts for n in row) / len(counts)
        share = sum(map(max, counts)) / sum(map(sum, counts))
        values = [list(row) for row in zip(*counts[::step], strict=True)]
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{record.path}/partition.json is damaged ({error!r}); delete it to go without") from None
    label = f"{e.data}, {e.partition}, seed {e.seed}"
    facts = (
        f"{clients} clients hold {kinds:.1f} of {len(counts[0])} classes each on average; "
        f"a client’s largest class holds {percent(share, 0)} of its samples."
    )
    columns = [client_name(record, client) for client in shown[::step]]
    heat = {"values": values, "rows": [str(n) for n in range(len(values))], "columns": columns, "ramp": "ink"}
    drawn = page.draw("heat", label, heat | {"x": "client", "y": "class", "value": "samples"})
    return joined([drawn, tag("p", facts, class_="small")])
