"""Models of a device are analysed there, with the CPU's bits; what comes back is on the CPU."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import blobs, restless
from make_believe import HERE, on_make_believe
from torch import Tensor, nn

import fedflat
from fedflat import analysis
from fedflat.analysis.results import plain

BATCHED = {"batch_size": 6}


def subject() -> nn.Module:
    """A small network with statistics, weights that are drawn, and dropout, which is off in an analysis."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.4), nn.Linear(3, 3))
    made(blobs(20, 2)[0].float())
    return made.eval()


def samples(count: int = 12, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x, y = blobs(count, 2)
    return x.to(device), y.to(device)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8, generator=generator), torch.arange(12) % 3


def small_cnn(device: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).to(device)


def other(net: nn.Module, device: Any = None, by: float = 0.1) -> nn.Module:
    """A model of the same architecture, elsewhere in its space."""
    moved = subject()
    with torch.no_grad():
        for number, parameter in enumerate(moved.parameters()):
            parameter.add_(by * (1 + number))
    return moved.to(device or next(net.parameters()).device)


def vector(net: nn.Module) -> Tensor:
    return torch.linspace(-1, 1, sum(p.numel() for p in net.parameters()))


ANALYSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "calibration": lambda net, data: analysis.calibration(net, data),
    "channel_curvature": lambda net, data: analysis.channel_curvature(net, data, "0", channels=[1], **BATCHED),
    "connectivity": lambda net, data: analysis.connectivity([net, other(net), other(net, by=0.3)], data, points=3),
    "corruptions": lambda net, data: analysis.corruptions(
        small_cnn(next(net.parameters()).device), images(), names=["contrast", "shot_noise"], **BATCHED
    ),
    "cross_client": lambda net, data: analysis.cross_client([net, other(net)], [data, data], probes=3),
    "curvature": lambda net, data: analysis.curvature(net, data, k=2, density=True),
    "feature_norm": lambda net, data: analysis.feature_norm(net, data, **BATCHED),
    "features": lambda net, data: analysis.features(net, data, **BATCHED),
    "generalisation": lambda net, data: analysis.generalisation(net, data, data, **BATCHED),
    "gradient_variance": lambda net, data: analysis.gradient_variance(net, data, batch_size=6),
    "gsnr": lambda net, data: analysis.gsnr(net, data, debias=True, **BATCHED),
    "hessian_diagonal": lambda net, data: analysis.hessian_diagonal(net, data, probes=4, **BATCHED),
    "hessian_product": lambda net, data: analysis.hessian_product(net, data, vector(net), **BATCHED),
    "hessian_trace": lambda net, data: analysis.hessian_trace(net, data, **BATCHED),
    "interpolate": lambda net, data: analysis.interpolate(net, other(net), data, points=3, test=data),
    "landscape_1d": lambda net, data: analysis.landscape_1d(net, data, direction=vector(net), points=3),
    "landscape_2d": lambda net, data: analysis.landscape_2d(net, data, direction="eigen", points=3, test=data),
    "landscape_2d by filter": lambda net, data: analysis.landscape_2d(net, data, points=3, max_samples=9),
    "landscape_plane": lambda net, data: analysis.landscape_plane(
        net, other(net), vector(net), data, points=3, **BATCHED
    ),
    "layer_curvature": lambda net, data: analysis.layer_curvature(net, data, **BATCHED),
    "magnitude_mask": lambda net, data: analysis.magnitude_mask(net, 0.3),
    "noise_curve": lambda net, data: analysis.noise_curve(net, data, draws=2, per_layer=True),
    "osgr": lambda net, data: analysis.osgr(net, data, samples(9), **BATCHED),
    "per_class_accuracy": lambda net, data: analysis.per_class_accuracy(net, data),
    "pruned": lambda net, data: analysis.pruned(net, 0.3).cpu().state_dict(),
    "pruned_features": lambda net, data: analysis.pruned_features(net, data),
    "spectrum": lambda net, data: analysis.spectrum(net, data, 3, multiplicity=True),
}


def numbers(found: Any) -> Any:
    """All that a result holds, as plain numbers; what is not on the CPU is an error."""
    if isinstance(found, Tensor):
        assert found.device.type == "cpu"
        return found.tolist()
    if isinstance(found, dict):
        return {name: numbers(each) for name, each in found.items()}
    if isinstance(found, (tuple, list)):
        return [numbers(each) for each in found]
    whole = {name: numbers(each) for name, each in vars(found).items()} if hasattr(found, "__dict__") else found
    return (whole, plain(found)) if hasattr(found, "to_dict") else whole


OF_A_MODEL = ("model", "models", "first")


def test_every_analysis_of_a_model_is_listed() -> None:
    functions = {name: f for name in analysis.__all__ if inspect.isfunction(f := getattr(analysis, name))}
    of_models = {n for n, f in functions.items() if next(iter(inspect.signature(f).parameters)) in OF_A_MODEL}
    assert of_models == {name.split()[0] for name in ANALYSES}


@on_make_believe
def test_a_model_on_a_device_is_analysed_there_with_the_bits_of_the_cpu() -> None:
    for name, analyse in ANALYSES.items():
        here = numbers(analyse(subject(), samples()))
        HERE.computed_on.clear()
        there = numbers(analyse(subject().to("gpu:1"), samples(device="gpu:0")))
        assert repr(there) == repr(here), name
        assert set(HERE.computed_on) <= {"gpu:0", "gpu:1"}
        assert HERE.computed_on["gpu:1"] > 10 or name in ("magnitude_mask", "pruned"), name


@on_make_believe
def test_models_of_two_devices_are_compared() -> None:
    data = samples()
    both = {
        "barriers": lambda a, b: analysis.connectivity([a, b], data, points=3),
        "line": lambda a, b: analysis.interpolate(a, b, data, points=3),
        "clients": lambda a, b: analysis.cross_client([a, b], [data, data], probes=3),
    }
    for name, look in both.items():
        here = numbers(look(subject(), other(subject())))
        there = numbers(look(subject().to("gpu:0"), other(subject(), "gpu:1")))
        assert repr(there) == repr(here), name


@on_make_believe
def test_the_host_waits_for_no_single_batch() -> None:
    net = subject().to("gpu:0")

    def waits(name: str, count: int) -> Counter[str]:
        data = samples(count, "gpu:0")
        HERE.waits.clear()
        ANALYSES[name](net, data)
        return HERE.waits.copy()

    for name in ("hessian_product", "generalisation", "features", "gradient_variance"):
        assert waits(name, 12) == waits(name, 24), name  # two batches, and four


@on_make_believe
def test_data_that_do_not_fit_are_copied_batch_by_batch() -> None:
    net, data = subject(), samples()
    here = analysis.hessian_trace(net, data, batch_size=3, probes=3, tol=0.0)
    net.to("gpu:0")
    HERE.copies.clear()
    fitting = analysis.hessian_trace(net, data, batch_size=3, probes=3, tol=0.0)
    few = HERE.copies["cpu to gpu"]
    tight = analysis.hessian_trace(net, data, batch_size=3, probes=3, tol=0.0, memory=1e-9)
    assert HERE.copies["cpu to gpu"] - few > few
    assert str(fitting) == str(here) == str(tight)


class Worn(nn.Module):
    """Gives other bits whenever it is called, as an operation without a deterministic kernel may."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.layer, self.step, self.calls = nn.Linear(2, 3), step, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) * (1 + self.step * self.calls)
        return out


@on_make_believe
def test_rounding_that_differs_on_a_device_is_a_warning_and_more_is_an_error() -> None:
    assert analysis.feature_norm(Worn(1e-6).to("gpu:0"), samples()) > 0
    for net in (Worn(1e-6), Worn(0.1).to("gpu:0")):
        with pytest.raises(fedflat.InputError, match="not deterministic"):
            analysis.feature_norm(net, samples())


@on_make_believe
def test_clients_are_watched_on_their_device() -> None:
    from helpers import plain, world

    watch = ["drift", "gsnr", "client_curvature", "feature_norms"]
    runs = [
        fedflat.run(plain(dtype="float32", device=device), federation=world(), model=restless(), watch=watch)
        for device in ("cpu", "gpu:0,gpu:1")
    ]
    columns = ("cosine", "norm", "gsnr_sum", "lambda_max", "feature_norm")
    left, right = ([[row[name] for name in columns] for row in run.clients] for run in runs)
    assert left == right
    assert torch.equal(runs[0].weights, runs[1].weights)
