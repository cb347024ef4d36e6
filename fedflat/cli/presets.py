"""List the presets, which are the settings of papers, or show one in full.

Run one with `fedflat run --preset NAME --method fedavg+asam`. The method then has the paper's hyperparameters.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedflat.cli.parser import Parser
from fedflat.specs import Call

if TYPE_CHECKING:
    from fedflat.presets import Preset


def configure(parser: Parser) -> None:
    """Add the argument."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the preset to show")


def execute(arguments: argparse.Namespace) -> int:
    """Print the list, or one preset."""
    from fedflat.console import console, plain_table, tell
    from fedflat.presets import all_presets, load_preset

    if arguments.name:
        tell("\n".join(described(load_preset(arguments.name))))
    else:
        rows = [_row(preset) for preset in all_presets().values()]
        console().print(plain_table(("preset", "tables", "about"), rows))
        tell("\n".join(papers()))
    return 0


def papers() -> list[str]:
    """One line per paper: its number, which the names of presets and tables use, and its title."""
    from fedflat.presets import all_presets

    return list(dict.fromkeys(f"paper {preset.paper}: {preset.title}" for preset in all_presets().values()))


def _row(preset: Preset) -> tuple[str, str, str]:
    return preset.id, ", ".join(preset.tables), preset.about


def described(preset: Preset) -> Iterator[str]:
    """The content of a preset as lines."""
    yield f"{preset.id}, version {preset.version}: {preset.about}"
    yield f"paper {preset.paper}: {preset.title}"
    seeds = f"; {preset.seeds} seeds" if preset.seeds else ""
    yield f"tables: {', '.join(preset.tables) or 'none'}\nreports: {preset.reported}, {preset.report}{seeds}"
    if preset.targets:
        yield f"targets: {', '.join(f'{target:g}' for target in preset.targets)}"
    yield from _section("fields", (f"{name} = {_value(preset, name)}" for name in preset.experiment))
    yield from _section("methods", _calls(preset.methods))
    for case in preset.cases:
        holds = [*case.get("with", ()), *filter(None, [case.get("partition")])]
        fields = (f"{name} = {value}" for name, value in case.get("experiment", {}).items())
        yield from _section(f"with {' and '.join(holds)}", (*fields, *_calls(case.get("methods", {}))))
    yield from _section("open in the paper", preset.notes)


def _value(preset: Preset, name: str) -> str:
    """The value of a field, the other values in the paper, and where the value comes from."""
    value = preset.experiment[name]
    others = [str(other) for other in preset.alternatives.get(name, ()) if other != value]
    remarks = [f"also {', '.join(others)}"] if others else []
    remarks += ["from the code"] if name in preset.from_code else ["chosen here"] if name in preset.chosen else []
    return f"{value}" + (f"   ({'; '.join(remarks)})" if remarks else "")


def _calls(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [str(Call(name, kwargs=values)) for name, values in parts.items()]


def _section(title: str, lines: Any) -> Iterator[str]:
    body = [textwrap.indent(line, "  ") for line in lines]
    if body:
        yield "\n".join(["", f"{title}:", *body])
