"""Every part on two make-believe devices: the CPU's bits, in the weights and in all that server and clients keep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import assert_same_run, restless
from make_believe import HERE, on_make_believe
from models.test_slim import small
from torch import nn

import fedflat
from fedflat import Experiment, Federation
from fedflat.data.preprocess import Preprocess
from parts.personal.federations import METHODS, go

from .harness import PARTIAL, REGIMES, assert_same_bits, make_world, run_library
from .parts import IMAGE_PARTS, PARTS, Listed
from .reference import Mlp

BOTH = "gpu:0,gpu:1"
HARD = REGIMES["Nesterov, weight decay, clip, unequal sizes, some take part"] | {
    "participants": PARTIAL[:2],
    "steps": 2,
}


@pytest.mark.parametrize("part", PARTS, ids=str)
@on_make_believe
def test_a_part_has_the_bits_of_the_cpu(part: Listed) -> None:
    world = make_world(Mlp(3, 5, 2), **HARD)
    assert_same_bits(run_library(world, part.text, device=BOTH), run_library(world, part.text, device="cpu"))


@pytest.mark.parametrize("part", IMAGE_PARTS, ids=str)
@on_make_believe
def test_a_part_for_images_has_the_bits_of_the_cpu(part: Listed) -> None:
    there, here = (images(part.text, device=device) for device in (BOTH, "cpu"))
    assert_same_bits(there, here)


@pytest.mark.parametrize("method", METHODS)
@on_make_believe
def test_a_personal_method_and_its_evaluation_have_the_bits_of_the_cpu(method: str) -> None:
    there, here = (go(method, restless(), dtype="float32", device=device) for device in (BOTH, "cpu"))
    assert_same_run(there, here, len(here.evaluations))
    assert there.evaluations == here.evaluations


@pytest.mark.parametrize("method", ["fedavg", "sam", "man", "scaffold", "feddc", "const"])
@on_make_believe
def test_no_local_step_waits_for_the_device(method: str) -> None:
    """Clip, momentum and augmentation are on; twice as many steps wait as often as half of them."""
    waits(method, 1)  # copies the tables of the preprocessing, once per process
    assert waits(method, 12) == waits(method, 6)


def waits(method: str, steps: int) -> Counter[str]:
    HERE.waits.clear()
    images(method, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 3)), local_steps=steps)
    return HERE.waits.copy()


def images(method: str, model: nn.Module | None = None, **changes: Any) -> fedflat.Run:
    """Two rounds on small images that are mirrored, cropped and normalised."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (3, 8, 3, 8, 8), dtype=torch.uint8, generator=generator)
    y = torch.randint(3, (3, 8), generator=generator)
    recipe = Preprocess((0.5,) * 3, (0.25,) * 3, flip=0.5, pad=2, crop=0.7, black=False)
    federation = Federation(list(zip(x, y, strict=True))[:2], (x[2], y[2]), classes=3, preprocess=recipe)
    fields: dict[str, Any] = {"method": method, "rounds": 2, "local_steps": 2, "batch_size": 4, "participation": "all"}
    fields |= {"lr": 0.01, "clip": 1.0, "momentum": 0.9, "backend": "serial", "device": "gpu:0"}
    network = small("resnet56(blocks=1, width=8)", (3, 8, 8), 3).float() if model is None else model
    return fedflat.run(Experiment(**(fields | changes)), federation=federation, model=network)
