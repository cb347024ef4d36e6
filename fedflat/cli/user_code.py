"""Code of the user's own that commands import: modules that register parts, functions that make models and data."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fedflat.errors import InputError


def imported(option: str, name: str) -> Any:
    """A user's module, which may be in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name.removesuffix(".py"))
    except Exception as error:
        raise InputError(f"{option} {name}: {type(error).__name__}: {error}") from error


def made(option: str, text: str) -> Any:
    """What the function MODULE:FUNCTION returns; None for an empty text."""
    if not text:
        return None
    name, _, function = text.partition(":")
    if not function:
        raise InputError(f"{option} takes MODULE:FUNCTION, such as mine:network, not {text!r}")
    make = getattr(imported(option, name), function, None)
    if not callable(make):
        raise InputError(f"{option} {text}: the module {name!r} has no function {function!r}")
    try:
        return make()
    except Exception as error:
        raise InputError(f"{option} {text}: {type(error).__name__}: {error}") from error
