"""Gradient accumulation: a minibatch in pieces has the gradient of the whole, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat import Experiment, Federation, InputError
from fedflat.core.samples import IGNORED


def experiment(**changes: Any) -> Experiment:
    given: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 10, "lr": 0.2, "clip": 1.0, "momentum": 0.5}
    given |= {"dtype": "float64", "backend": "serial", "evaluate_clients": None}
    return Experiment(**given | changes)


def world(dense: bool = False) -> tuple[Federation, nn.Module]:
    generator = torch.Generator().manual_seed(5)

    def client(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 2, 6, 6, generator=generator)
        y = torch.randint(3, (size, 6, 6) if dense else (size,), generator=generator)
        if dense:
            y[torch.rand(y.shape, generator=generator) < 0.3] = IGNORED
            y[0] = IGNORED  # a whole picture that does not count
        return x, y

    torch.manual_seed(6)
    head = [nn.Conv2d(4, 3, 1)] if dense else [nn.Flatten(), nn.Linear(144, 3)]
    return Federation([client(10), client(7)], test=client(5)), nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), *head
    )


@pytest.mark.parametrize(
    "method", ["fedavg", "sam", "scaffold(option=1)+man", "mixup+fedprox", "fedlc+qfedavg", "ditto", "fedrep"]
)
@pytest.mark.parametrize("size", [1, 4])
def test_pieces_give_the_gradient_of_the_whole_minibatch(method: str, size: int) -> None:
    federation, model = world()
    whole, cut = (
        fedflat.run(experiment(method=method, microbatch=pieces), federation=federation, model=model)
        for pieces in (None, size)
    )
    assert torch.allclose(cut.weights, whole.weights, rtol=0, atol=1e-12)
    assert [row["loss"] for row in cut.clients] == pytest.approx([row["loss"] for row in whole.clients], abs=1e-12)


def test_pieces_of_pictures_count_by_the_pixels_that_have_a_label() -> None:
    federation, model = world(dense=True)
    whole, cut = (
        fedflat.run(experiment(microbatch=pieces), federation=federation, model=model) for pieces in (None, 1)
    )
    assert torch.allclose(cut.weights, whole.weights, rtol=0, atol=1e-12)


def test_pieces_that_are_larger_than_the_minibatch_change_no_bit() -> None:
    federation, model = world()
    whole, cut = (
        fedflat.run(experiment(microbatch=pieces, dtype="float32"), federation=federation, model=model)
        for pieces in (None, 10)
    )
    assert cut.weights.equal(whole.weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatch": 0}, "microbatch must be"),
        ({"microbatch": 2, "method": "feddecorr"}, "feddecorr adds to the loss"),
        ({"microbatch": 2, "method": "moon"}, "moon adds to the loss"),
        ({"microbatch": 2, "method": "fedsol"}, "function of the whole minibatch"),
        ({"microbatch": 2, "loss": "ohem(0.25)"}, "no mean over samples"),
    ],
)
def test_what_needs_the_whole_minibatch_is_refused(changes: dict[str, Any], words: str) -> None:
    federation, model = world(dense="loss" in changes)
    with pytest.raises(InputError, match=words):
        fedflat.run(experiment(**changes), federation=federation, model=model)


def test_batchnorm_is_refused_unless_its_statistics_are_frozen() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    federation, model = world()
    assert isinstance(model, nn.Sequential)
    with pytest.raises(InputError, match="normalises by the statistics"):
        e = experiment(microbatch=2)
        fedflat.run(e, federation=federation, model=nn.Sequential(model[0], nn.BatchNorm2d(4), *model[1:]))
    frozen = nn.Sequential(model[0], Frozen(4), *model[1:])
    whole, cut = (fedflat.run(experiment(microbatch=m), federation=federation, model=frozen) for m in (None, 2))
    assert torch.allclose(cut.weights, whole.weights, rtol=0, atol=1e-12)
