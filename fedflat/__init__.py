"""Federated learning that generalises: every method a sum of small parts, one loop that runs them all.

Names are imported when first used, so that `fedflat --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat import analysis
    from fedflat.callbacks import Callback, EarlyStopping, TargetStopping
    from fedflat.data import Federation, load_federation
    from fedflat.errors import FedflatError, InputError, RunError
    from fedflat.experiment import Experiment
    from fedflat.flat import FlatModel
    from fedflat.method import Local, Method, Part, Server
    from fedflat.parts import register
    from fedflat.presets import preset
    from fedflat.report.compare import compare
    from fedflat.report.comparison import Comparison
    from fedflat.result import Run, load_run
    from fedflat.runner import run

_HOMES = {
    "Callback": "callbacks",
    "Comparison": "report.comparison",
    "EarlyStopping": "callbacks",
    "Experiment": "experiment",
    "Federation": "data",
    "FedflatError": "errors",
    "FlatModel": "flat",
    "InputError": "errors",
    "Local": "method",
    "Method": "method",
    "Part": "method",
    "Run": "result",
    "RunError": "errors",
    "Server": "method",
    "TargetStopping": "callbacks",
    "compare": "report.compare",
    "load_federation": "data",
    "load_run": "result",
    "preset": "presets",
    "register": "parts",
    "run": "runner",
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
