"""Federated learning that generalises: every method is a sum of small parts, and one loop runs them all.

Names are imported when first used, so that `fedflat --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat import analysis
    from fedflat.core.flat import FlatModel
    from fedflat.core.method import Method
    from fedflat.core.part import Part
    from fedflat.core.views import Local, Server
    from fedflat.data import Federation, load_federation
    from fedflat.errors import FedflatError, InputError, RunError
    from fedflat.experiment import Experiment
    from fedflat.parts import register
    from fedflat.presets import preset
    from fedflat.report.compare import compare
    from fedflat.report.comparison import Comparison
    from fedflat.runs.callbacks import Callback, EarlyStopping, TargetStopping
    from fedflat.runs.result import Run, load_run
    from fedflat.runs.runner import run

_HOMES = {
    "Callback": "runs.callbacks",
    "Comparison": "report.comparison",
    "EarlyStopping": "runs.callbacks",
    "Experiment": "experiment",
    "Federation": "data",
    "FedflatError": "errors",
    "FlatModel": "core.flat",
    "InputError": "errors",
    "Local": "core.views",
    "Method": "core.method",
    "Part": "core.part",
    "Run": "runs.result",
    "RunError": "errors",
    "Server": "core.views",
    "TargetStopping": "runs.callbacks",
    "compare": "report.compare",
    "load_federation": "data",
    "load_run": "runs.result",
    "preset": "presets",
    "register": "core.registry",
    "run": "runs.runner",
}
__all__ = [
    "Callback",
    "Comparison",
    "EarlyStopping",
    "Experiment",
    "Federation",
    "FedflatError",
    "FlatModel",
    "InputError",
    "Local",
    "Method",
    "Part",
    "Run",
    "RunError",
    "Server",
    "TargetStopping",
    "analysis",
    "compare",
    "load_federation",
    "load_run",
    "preset",
    "register",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "analysis":
        return importlib.import_module("fedflat.analysis")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedflat' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fedflat.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
