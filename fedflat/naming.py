"""What the folder of a run is called."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path

from fedflat.experiment import IRRELEVANT, Experiment


def default_out(experiment: Experiment) -> Path:
    """A readable folder under `runs/` that belongs to this experiment alone.

    It ends in a hash of the fields that differ from their defaults; those that cannot change a result are left out.
    """
    changed = {
        spec.name: getattr(experiment, spec.name)
        for spec in fields(experiment)
        if spec.name not in IRRELEVANT and getattr(experiment, spec.name) != spec.default
    }
    name = f"{slug(experiment.method)}-{slug(experiment.data)}-s{experiment.seed}-{digest(changed)}"
    return Path("runs") / name


def digest(values: object) -> str:
    """Six characters that tell plain values apart."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def slug(text: str) -> str:
    """Text as part of a file name: `"feddc(alpha=0.01)+man"` becomes `"feddc-alpha0.01-man"`."""
    return re.sub(r"[^\w.]+", "-", text.replace("=", "")).strip("-.")[:48]
