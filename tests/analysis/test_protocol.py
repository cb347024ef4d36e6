"""The conditions of an analysis: the model is left alone, data and model are deterministic, bad input is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedflat
from analysis.worlds import blobs, convnet, first, images, network, snapshot, unchanged
from fedflat import FlatModel, InputError, analysis
from fedflat.data.samples import TensorSamples


def prepared() -> nn.Module:
    """A model in training mode, with a gradient, and with a parameter that is not trained."""
    model = convnet().train()
    x, y = images(8)
    nn.functional.cross_entropy(model(x), y).backward()
    model[1].weight.requires_grad_(False)
    model[0].eval()
    return model


ANALYSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "curvature": lambda m, d: analysis.curvature(m, d, k=2, probes=3),
    "workers": lambda m, d: analysis.curvature(m, d, k=2, trace=False, workers=2, batch_size=3),
    "batch statistics": lambda m, d: analysis.hessian_trace(m, d, probes=2, bn="batch"),
    "layers": lambda m, d: analysis.layer_curvature(m, d, layers=["7"], probes=2),
    "landscape": lambda m, d: analysis.landscape_1d(m, d, points=3),
    "line": lambda m, d: analysis.interpolate(m, convnet_like(m), d, points=3),
    "noise": lambda m, d: analysis.noise_curve(m, d, draws=2, ratios=(0.0, 0.5)),
    "signal": lambda m, d: analysis.gsnr(m, d),
    "step": lambda m, d: analysis.osgr(m, d, d),
    "features": lambda m, d: analysis.features(m, d),
    "pruning": lambda m, d: analysis.pruned(m),
}


def convnet_like(model: nn.Module) -> nn.Module:
    other = convnet()
    other[1].weight.requires_grad_(False)
    return other


@pytest.mark.parametrize("name", ANALYSES)
def test_model_is_left_bit_for_bit(name: str) -> None:
    model, data = prepared(), images(9)
    before = snapshot(model)
    ANALYSES[name](model, data)
    assert unchanged(before, snapshot(model))


class FailsLater(nn.Module):
    """Works a few times, then raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.left = convnet(), [12]

    def __deepcopy__(self, memo: Any) -> FailsLater:
        copied = FailsLater()
        copied.inner.load_state_dict(self.inner.state_dict())
        copied.left = self.left
        return copied

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] == 0:
            raise ArithmeticError("no more")
        return self.inner(x)


def test_model_is_left_alone_when_something_raises() -> None:
    model = FailsLater()
    before = snapshot(model)
    with pytest.raises(ArithmeticError):
        analysis.landscape_1d(model, images(5), points=11)
    assert unchanged(before, snapshot(model))


def test_batches_count_by_their_size() -> None:
    model, (x, y) = network(), blobs(30)
    whole = analysis.hessian_trace(model, (x, y), probes=4)
    uneven = analysis.hessian_trace(model, [(x[:2], y[:2]), (x[2:9], y[2:9]), (x[9:], y[9:])], probes=4)
    assert uneven.trace == pytest.approx(whole.trace, rel=1e-12)
    assert uneven.conditions is not None and whole.conditions is not None
    assert uneven.conditions.loss == pytest.approx(whole.conditions.loss, rel=1e-12)


def test_every_form_of_data_gives_one_result() -> None:
    model, (x, y) = network(), blobs(30)
    dataset = TensorDataset(x, y)
    forms: list[Any] = [
        (x, y), (x.numpy(), y.numpy()), [(x, y)], DataLoader(dataset, 30), dataset,
        list(zip(x, y.tolist(), strict=True)), ((a, b) for a, b in [(x, y)]), TensorSamples(x, y),
    ]  # fmt: skip
    traces = [analysis.hessian_trace(model, form, probes=2, batch_size=30).trace for form in forms]
    assert traces == [traces[0]] * len(forms)


def test_subset_is_fixed_by_the_seed_and_all_where_there_are_fewer() -> None:
    model, data = network(), blobs(30)
    a, b, c = (analysis.hessian_trace(model, data, probes=2, max_samples=7, seed=s) for s in (1, 1, 2))
    assert a.trace == b.trace != c.trace
    assert a.conditions is not None and (a.conditions.samples, a.conditions.seed) == (7, 1)
    whole = analysis.hessian_trace(model, data, probes=2).trace
    assert analysis.hessian_trace(model, data, probes=2, max_samples=99).trace == whole


class AlwaysDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.dropout(x, 0.5))


def test_random_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"not deterministic.* a loss of .*, then "):
        analysis.curvature(AlwaysDropout(), blobs(30))


def test_shuffled_or_augmented_data_is_refused() -> None:
    x, y = blobs(30)
    with pytest.raises(InputError, match=r"batch 1 of the data differs when read again .*shuffling"):
        analysis.curvature(network(), DataLoader(TensorDataset(x, y), 10, shuffle=True))

    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return x[index] + torch.rand(()), y[index]

    with pytest.raises(InputError, match=r"differs when read again \(its inputs\)"):
        analysis.curvature(network(), Noisy(x, y))


class NoisySamples(TensorSamples):
    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = super().batch(indices)
        return x, (y + torch.randint(0, 3, y.shape)) % 3


def test_samples_that_change_are_refused() -> None:
    with pytest.raises(InputError, match=r"differs when read again \(its labels\)"):
        analysis.curvature(network(), NoisySamples(*blobs(30)))


class Growing:
    """An iterable that has one batch more at every reading."""

    def __init__(self) -> None:
        self.readings = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.readings += 1
        return iter([blobs(4)] * self.readings)


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def headless() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()).double()


def broken() -> nn.Module:
    model = network()
    model[2].bias.data[0] = torch.nan
    return model


def turned() -> nn.Module:
    """As many weights as the network, in other places."""
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(4, 5)).double()


def line() -> nn.Module:
    return nn.Linear(4, 3).double()


def late_label() -> tuple[Tensor, Tensor]:
    """A label too large, beyond the samples by which the memory is measured."""
    x, y = blobs(9)
    y[-1] = 3
    return x, y


def numbers() -> tuple[Tensor, Tensor]:
    x, y = blobs(9)
    return x, y.double()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing trainable": (lambda: analysis.curvature(frozen(), blobs(9)), "requires a gradient: call requires_grad_"),
    "no labels": (lambda: analysis.curvature(network(), blobs(9)[0]), "no labels that could be used: give a pair"),
    "no labels in batches": (lambda: analysis.curvature(network(), [blobs(9)[0]]), "no labels"),
    "no data at all": (lambda: analysis.curvature(network(), None), "no labels"),
    "empty": (lambda: analysis.curvature(network(), (torch.zeros(0, 4), torch.zeros(0))), "at least one sample"),
    "empty list": (lambda: analysis.curvature(network(), []), "at least one sample"),
    "fewer labels": (lambda: analysis.curvature(network(), (blobs(9)[0], blobs(8)[1])), "9 inputs but 8 targets"),
    "growing": (lambda: analysis.curvature(network(), Growing()), "more batches when read again"),
    "not finite": (lambda: analysis.curvature(broken(), blobs(9)), "not finite"),
    "k too large": (lambda: analysis.curvature(network(), blobs(9), k=44), "from 1 to the number of parameters, 43"),
    "spectrum of 0": (lambda: analysis.spectrum(network(), blobs(9), k=0), "k must be from 1"),
    "k of 0": (lambda: analysis.curvature(network(), blobs(9), k=0), "k must be from 1"),
    "no scalar": (lambda: analysis.curvature(network(), blobs(9), loss=lambda o, y: o), "must be one number"),
    "option": (lambda: analysis.curvature(network(), blobs(9), worker=2), "did you mean 'workers'"),
    "statistics": (lambda: analysis.curvature(network(), blobs(9), bn="runing"), "did you mean 'running'"),
    "batch statistics": (lambda: analysis.curvature(network(), blobs(99), bn="batch"), "give batch_size"),
    "layer": (lambda: analysis.layer_curvature(network(), blobs(9), layers=["3"]), "unknown layer '3'"),
    "granularity": (lambda: analysis.layer_curvature(network(), blobs(9), granularity="x"), "unknown granularity"),
    "channel": (lambda: analysis.channel_curvature(network(), blobs(9), "2", channels=[3]), "channels 0 to 2"),
    "direction": (lambda: analysis.landscape_1d(network(), blobs(9), direction="filtre"), "did you mean 'filter'"),
    "collinear": (lambda: collinear(), "one line.*interpolate"),
    "same models": (lambda: analysis.landscape_plane(network(), network(), network(), blobs(9)), "models are equal"),
    "other model": (lambda: analysis.interpolate(network(), network(5), blobs(9)), "one architecture"),
    "no probes": (lambda: analysis.hessian_trace(network(), blobs(9), probes=0), "at least one probe"),
    "vector": (lambda: analysis.hessian_product(network(), blobs(9), torch.zeros(3)), "43 parameters"),
    "clients": (lambda: analysis.cross_client([network()], [blobs(9)]), "two models or more"),
    "diagonal": (lambda: analysis.cross_client([network()], [blobs(9)], diagonal="elment"), "did you mean 'element'"),
    "negative workers": (lambda: analysis.curvature(network(), blobs(9), workers=-1), "must not be negative"),
    "feature layer": (lambda: analysis.features(network(), blobs(9), layer="last"), "unknown layer"),
    "headless": (lambda: analysis.features(headless(), images(9)), "no Linear head"),
    "prune": (lambda: analysis.pruned(network(), which="botom"), "did you mean 'bottom'"),
    "one sample": (lambda: analysis.gsnr(network(), blobs(1)), "two samples"),
    "memory": (lambda: analysis.curvature(network(), blobs(9), memory=float("inf")), "positive number of GiB, got inf"),
    "no memory": (lambda: analysis.curvature(network(), blobs(9), memory=0), "positive number of GiB, got 0"),
    "label": (lambda: analysis.curvature(network(), late_label()), "cannot take the data: Target 3 is out of bounds"),
    "test label": (lambda: analysis.landscape_1d(network(), blobs(9), test=late_label(), points=2), "Target 3"),
    "width": (lambda: analysis.curvature(network(5), blobs(9)), "cannot take the data: .*check the shapes"),
    "loss": (lambda: analysis.curvature(network(), blobs(9), loss="mse"), "cannot take the data: .*not callable"),
    "broken end": (lambda: analysis.interpolate(network(), broken(), blobs(9)), "weights of one .* not finite"),
    "other shapes": (lambda: analysis.interpolate(network(), turned(), blobs(9)), "in other shapes"),
    "other clients": (lambda: analysis.cross_client([network(), line()], [blobs(9)] * 2, probes=1), "one architecture"),
    "no points": (lambda: analysis.landscape_2d(network(), blobs(9), points=0), "two points or more"),
    "pairs": (lambda: analysis.compare_diagonals(torch.ones(2, 3), "al"), "did you mean 'all'"),
    "one diagonal": (lambda: analysis.compare_diagonals(torch.ones(1, 3)), "two rows or more"),
    "nan scores": (lambda: analysis.calibration_of(torch.full((2, 3), torch.nan), torch.zeros(2)), "none of them nan"),
    "scores": (lambda: analysis.calibration_of(torch.ones(2, 3), torch.zeros(3)), "one row of scores per label"),
    "numbers": (lambda: analysis.calibration(network(), numbers(), loss=first), "calibration needs scores of shape"),
    "class numbers": (lambda: analysis.per_class_accuracy(network(), numbers(), loss=first), "integer labels"),
    "labels of places": (lambda: analysis.silhouette(torch.ones(4, 2), torch.ones(4, 5)), "one label per row"),
    "lengths": (lambda: analysis.drift_diversity([torch.ones(3), torch.ones(4)]), "of one length"),
    "server": (lambda: analysis.weight_cosines(torch.ones(2, 3), torch.ones(4)), "3 weights, the server 4"),
    "movement": (lambda: analysis.by_movement(torch.ones(3), torch.ones(4), torch.ones(4)), "vectors of one length"),
}  # fmt: skip


def collinear() -> Any:
    a, b = network(), network()
    with torch.no_grad():
        for p in b.parameters():
            p += 1
    middle = (nn.utils.parameters_to_vector(a.parameters()) + nn.utils.parameters_to_vector(b.parameters())) / 2
    return analysis.landscape_plane(a, b, middle, blobs(9))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_a_remedy(name: str) -> None:
    work, message = BAD[name]
    with pytest.raises(InputError, match=message):
        work()


def test_batch_statistics_are_those_of_the_batch() -> None:
    """In training mode without dropout the plain loss is the one that is reported."""
    model, (x, y) = convnet(), images(12)
    model[4].p = 0.0
    expected = nn.functional.cross_entropy(model.train()(x), y).item()
    found = analysis.hessian_trace(convnet(), (x, y), probes=1, bn="batch").conditions
    assert found is not None and found.loss == pytest.approx(expected, rel=1e-12)
    assert found.mode.endswith("batch statistics")


def test_attention_can_be_differentiated_twice() -> None:
    torch_state = torch.get_rng_state()
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    torch.set_rng_state(torch_state)
    found = analysis.curvature(model, (x, torch.arange(6) % 3), k=1, trace=False)
    assert found.eigenvalues[0] > 0


def test_a_flat_model_is_a_model() -> None:
    model, data = network(), blobs(12)
    wrapped = analysis.hessian_trace(FlatModel(model, torch.float64), data, probes=2)
    assert wrapped.trace == analysis.hessian_trace(model, data, probes=2).trace


def test_progress_and_estimate(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "fedflat.analysis"):
        analysis.curvature(network(), blobs(9), k=1, probes=3, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, 44))
    assert "curvature: 43 steps" in caplog.text and "about 0:0" in caplog.text


def test_what_takes_long_is_announced_before_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedflat.analysis.progress.LONG", 0.0)
    analysis.hessian_trace(network(), blobs(9), probes=3, progress=True)
    assert capsys.readouterr().err.startswith("trace: 3 steps, ")


def test_without_a_terminal_progress_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedflat.analysis.progress.PAUSE", 1e-9)
    analysis.curvature(network(), blobs(9), k=1, probes=3, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 43" in line]
    assert lines[0].startswith("curvature: 1 of 43, about") and lines[-1] == "curvature: 43 of 43, about 0:00 left"


class Inputs(NamedTuple):
    """What the model below takes."""

    left: Tensor
    right: Tensor


class Adds(nn.Module):
    """Classifies the sum of two inputs, which come in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Tensor:
        left, right = x.values() if isinstance(x, dict) else x
        return self.head(left + right)


@pytest.mark.parametrize("pack", [lambda a, b: {"left": a, "right": b}, lambda a, b: (a, b), Inputs])
def test_inputs_may_be_structures_of_tensors_as_in_training(pack: Any) -> None:
    torch.manual_seed(0)
    model, a, b, y = Adds(), torch.randn(12, 4), torch.randn(12, 4), torch.arange(12) % 3
    whole = analysis.curvature(model.head, (a + b, y), k=2, trace=False)
    found = analysis.curvature(model, (pack(a, b), y), k=2, trace=False, batch_size=5)
    torch.testing.assert_close(found.eigenvalues, whole.eigenvalues, rtol=1e-4, atol=1e-6)


def test_watching_looks_at_inputs_that_are_structures() -> None:
    data = [({"left": torch.randn(8, 4), "right": torch.randn(8, 4)}, torch.arange(8) % 3) for _ in range(2)]
    pairs = [[({k: v[i] for k, v in x.items()}, y[i]) for i in range(8)] for x, y in data]
    exp = fedflat.Experiment(participation="all", rounds=1, batch_size=4, backend="serial")
    run = fedflat.run(
        exp, federation=fedflat.Federation(pairs, classes=3), model=Adds(), watch=["gsnr", "client_curvature"]
    )
    assert all({"gsnr_sum", "lambda_max"} <= row.keys() for row in run.clients)
