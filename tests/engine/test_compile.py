"""Networks that `torch.compile` compiles in the process that trains: the same results up to rounding, or a clear no."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from helpers import network, plain, restless, world

import fedflat
from fedflat import InputError
from fedflat.engine.assembly import make_setup
from fedflat.engine.stacking import prepare

COMPILED = plain(dtype="float32", compile="default", method="scaffold+sam", momentum=0.9, clip=1.0, rounds=1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_workers_compile_the_network_and_find_the_same_weights_up_to_rounding() -> None:
    """With running statistics, dropout, and two forward passes per step."""
    experiment = COMPILED.replace(backend="pool", workers=1)
    plainly, first, again = (
        fedflat.run(experiment.replace(compile=mode), federation=world((8, 8)), model=restless())
        for mode in ("none", "default", "default")
    )
    torch.testing.assert_close(first.weights, plainly.weights, rtol=1e-4, atol=1e-5)
    assert first.metrics[-1]["loss"] == pytest.approx(plainly.metrics[-1]["loss"], rel=1e-4)
    assert torch.equal(first.weights, again.weights)


@pytest.mark.parametrize("method", ["man", "moon", "fedalign"])
def test_a_part_that_looks_into_the_network_is_refused(method: str) -> None:
    with pytest.raises(InputError, match=f"{method} looks into the network, which compile='default' closes"):
        fedflat.run(COMPILED.replace(method=method), federation=world(), model=network())


def test_cuda_graphs_need_cuda_and_kernels_a_compiler() -> None:
    with pytest.raises(InputError, match="device='cpu' has no compile='reduce-overhead'; it has: none, default"):
        fedflat.run(COMPILED.replace(compile="reduce-overhead", device="cpu"), federation=world(), model=network())
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        fedflat.run(COMPILED, federation=world(), model=network())


def test_compiled_clients_train_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    setup = make_setup(COMPILED.replace(stack=4), federation=world(), model=network())
    with caplog.at_level(logging.WARNING, "fedflat"):
        prepare(setup, lambda t: range(setup.clients))
    assert setup.stack == 1
    assert "not stacked: compile='default'" in caplog.text
