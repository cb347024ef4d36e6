"""Runs whose power is cut, once or twice, and which go on."""

from __future__ import annotations

import logging
import math
import random
import sys
from pathlib import Path
from typing import Any

from helpers import assert_same_run, plain, restless, world

import fedflat
from torture.disk import Disk, PowerCut

SIZES = (6, 10, 14, 8)
EXP = plain(rounds=4, method="diary", participation="uniform(2)", dtype="float32", lr=0.3, momentum=0.9)
EXP = EXP.replace(backend="serial")


def go(out: Path | None, seconds: float = 0.0, memory: int = 1 << 30, **options: Any) -> fedflat.Run:
    """The experiment; a checkpoint after every round, or with `seconds` = ∞ at the end only."""
    engine: Any = sys.modules["fedflat.runs.runner"]
    usual, engine.CHECKPOINT_SECONDS = engine.CHECKPOINT_SECONDS, seconds
    try:
        given: dict[str, Any] = {"federation": world(SIZES), "model": restless(), "out": out, "state_memory": memory}
        return fedflat.run(EXP, **(given | options))
    finally:
        engine.CHECKPOINT_SECONDS = usual


def cut(folder: Path, image: Path, luck: random.Random, settled: bool, **options: Any) -> bool:
    """Cut a run's power at a random moment; False if the run came to its end before."""
    disk = Disk(folder, image, luck.randint(1, 60 if options["seconds"] else 140), luck, settled)
    try:
        with disk.watched():
            go(folder, **options)
    except PowerCut:
        return True
    return False


def trial(place: Path, number: int, reference: fedflat.Run) -> str:
    """One run with one or two cuts, numbered for its luck; what is wrong with its end, or nothing."""
    luck = random.Random(number)
    options: dict[str, Any] = {"seconds": luck.choice([0.0, 0.0, math.inf]), "memory": luck.choice([0, 1 << 30])}
    folder, settled = place / f"{number}-0", False
    folder.mkdir(parents=True)
    try:
        for attempt in range(1, luck.choice([2, 2, 3])):
            image = place / f"{number}-{attempt}"
            if not cut(folder, image, luck, settled, **options):
                break
            folder, settled = image, True
        assert_same_run(go(folder, **options), reference, len(SIZES))
        assert_same_run(fedflat.load_run(folder, model=restless()), reference, len(SIZES))
        if (folder / "model.safetensors").read_bytes() != (place / "whole/model.safetensors").read_bytes():
            return f"cut {number}: another model file"
    except (Exception, AssertionError) as error:
        return f"cut {number}: {type(error).__name__} {error}"
    return ""


def power_cuts(place: Path, count: int, first: int = 0) -> list[str]:
    """What is wrong after so many trials."""
    logging.getLogger("fedflat").setLevel(logging.ERROR)  # it tells of checkpoints that it cannot use
    try:
        reference = go(place / "whole")
        return [wrong for number in range(first, first + count) if (wrong := trial(place, number, reference))]
    finally:
        logging.getLogger("fedflat").setLevel(logging.NOTSET)
