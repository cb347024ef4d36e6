"""The parts that method strings may name: the package's own, those of installed packages, and the user's."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from inspect import get_annotations, isabstract, isclass

from fedflat import specs
from fedflat.core.part import SLOTS, Part
from fedflat.errors import InputError, nearest

log = logging.getLogger(__name__)
_own: dict[str, type[Part]] = {}
_aliases: dict[str, type[Part]] = {}
_sums: dict[str, Callable[..., tuple[Part, ...]]] = {}
_registered: dict[str, type[Part]] = {}


def ship(
    parts: tuple[type[Part], ...],
    aliases: dict[str, type[Part]],
    sums: dict[str, Callable[..., tuple[Part, ...]]],
) -> None:
    """Make the package's own parts known.

    Args:
        parts: The parts.
        aliases: Well-known names for one part on top of `fedavg`; they take the fields of that part.
        sums: Well-known names for several parts: functions that make them.
    """
    _own.update({part.name: part for part in parts})
    _aliases.update(aliases)
    _sums.update(sums)


def register(part: type[Part]) -> type[Part]:
    """Make a part of your own known to method strings under its `name` (usable as a class decorator).

    Raises:
        InputError: The name exists already, a public method is no slot, or the class is no dataclass.
    """
    if part.name in _shipped() or part.name in (*_aliases, *_sums):
        raise InputError(f"a part called {part.name!r} exists already; choose another name")
    _check_spelling(part)
    _registered[part.name] = part
    return part


def _check_spelling(part: type[Part]) -> None:
    """Refuse what would have no effect: a method that is no slot, and fields of a class that is no dataclass."""
    for name, value in vars(part).items():
        if callable(value) and not name.startswith("_") and not hasattr(Part, name):
            near = next((slot for slot in SLOTS if slot.startswith(f"{name}_")), None) or nearest(name, SLOTS)
            hint = f"did you mean {near!r}? " if near else ""
            raise InputError(f"{part.__name__}.{name} fills no slot: {hint}The name of a helper begins with '_'")
    fields = [name for name, kind in get_annotations(part).items() if "ClassVar" not in str(kind)]
    if fields and "__dataclass_fields__" not in vars(part):
        raise InputError(f"{part.__name__} has fields but is no dataclass: write @dataclass(frozen=True) above it")


def _shipped() -> dict[str, type[Part]]:
    importlib.import_module("fedflat.parts")  # calls `ship`
    return _own


@cache
def _installed() -> dict[str, type[Part]]:
    """Parts of other packages (entry points "fedflat.parts"); a broken one, or one with a name of ours, is left out."""
    found: dict[str, type[Part]] = {}
    for entry in entry_points(group="fedflat.parts"):
        try:
            part = entry.load()
            if not (isclass(part) and issubclass(part, Part)) or isabstract(part):
                raise InputError("it is not a subclass of fedflat.Part")
            if entry.name in _shipped() or entry.name in (*_aliases, *_sums):
                raise InputError("fedflat has a part of this name")
            _check_spelling(part)
        except Exception as error:  # another package may raise anything
            log.warning("the installed part %r (%s) is left out: %s", entry.name, entry.value, error)
            continue
        found[entry.name] = part
    return found


def known_parts() -> dict[str, type[Part]]:
    """All parts by name: the package's own, installed ones and registered ones."""
    return _shipped() | _installed() | _registered


def aliases() -> dict[str, type[Part]]:
    """Well-known names for `fedavg` plus one part."""
    _shipped()
    return _aliases


def named_sums(text: str) -> list[str]:
    """What the names of sums in a method string stand for, as in "'fedgamma' is sam+scaffold"."""
    calls = [call for call in specs.parse_sum(text) if call.name in _sums]
    made = [(call.name, specs.build("method", call, _sums)) for call in calls]
    return [f"{name!r} is {'+'.join(sorted(part.name for part in parts))}" for name, parts in made]


def parse_parts(text: str) -> list[Part]:
    """The parts of a method string, with aliases resolved."""
    known = known_parts()
    makers: dict[str, Callable[..., Part | tuple[Part, ...]]] = {**known, **_aliases, **_sums}
    made = [specs.build("method", call, makers) for call in specs.parse_sum(text)]
    return [part for one in made for part in ([one] if isinstance(one, Part) else one)]
