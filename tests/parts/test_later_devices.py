"""The methods since the five papers on a make-believe accelerator: the CPU's bits, and no tensor on the wrong side."""

from __future__ import annotations

import torch
from helpers import plain, world
from make_believe import on_make_believe

import fedflat

METHODS = (
    *("fedlc+fedntd", "fedgf", "fedwmsam", "fedexp", "qfedavg", "fedsol(adaptive=True)", "fedsmoo", "fedgloss", "ifca"),
    *("fedinit(variant='code')+fedswa", "fedmoswa(option=1)+feddecorr", "fedlesam(direction='last')+fedcm"),
    "apfl(mix='logits')",
)


@on_make_believe
def test_a_device_gives_the_bits_of_the_cpu() -> None:
    for method in METHODS:
        settings = {"method": method, "model": "mlp(hidden=8)", "rounds": 2, "local_steps": 2, "batch_size": 4}
        runs = [
            fedflat.run(plain(**settings, backend="serial", device=device), federation=world())
            for device in ("cpu", "gpu:0")
        ]
        assert torch.equal(runs[0].weights, runs[1].weights), method
