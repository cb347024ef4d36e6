"""The parts, one file per paper or family. A new one is a file like these and a line in `PARTS`.

Parts of other packages register under the entry-point group `fedflat.parts`, or with `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

from fedflat.calls import Call
from fedflat.errors import InputError
from fedflat.method import Part
from fedflat.parts.fedavg import FedAvg

PARTS: tuple[type[Part], ...] = (FedAvg,)
ALIASES: dict[str, Callable[[Call], list[Part]]] = {}
_registered: dict[str, type[Part]] = {}


def register(part: type[Part]) -> type[Part]:
    """Make a part of your own known to method strings under its `name` (usable as a class decorator)."""
    if part.name in {known.name for known in PARTS}:
        raise InputError(f"a part called {part.name!r} exists already; choose another name")
    _registered[part.name] = part
    return part


@cache
def _installed() -> dict[str, type[Part]]:
    return {entry.name: entry.load() for entry in entry_points(group="fedflat.parts")}


def known_parts() -> dict[str, type[Part]]:
    """All parts by name: the package's own, installed ones and registered ones."""
    return {part.name: part for part in PARTS} | _installed() | _registered
