"""What an analysis costs, as ratios measured in one run.

    python benchmarks/analysis.py [--model cnn64] [--samples 512] [--repeats 5]

A Hessian product over a gradient; products until the 20 largest eigenvalues have converged; two workers over one.
The model is trained for a moment first, since an untrained one has another spectrum. Limits are in brackets. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.analysis import curvature
from fedflat.analysis.hvp import Hessian
from fedflat.analysis.landscape import score_points
from fedflat.analysis.problem import Protocol, opened
from fedflat.core import streams
from fedflat.models import build_model

SHAPE, CLASSES = (3, 32, 32), 10


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of ten kinds, smooth enough for a convolutional network to learn them."""
    source = streams.stream(0, "benchmark")
    y = torch.arange(samples) % CLASSES
    coarse = source.normal((CLASSES, SHAPE[0], 4, 4))
    kinds = F.interpolate(coarse, SHAPE[1:], mode="bilinear")
    return kinds[y] + source.normal((samples, *SHAPE)), y


def trained(name: str, data: tuple[Tensor, Tensor], steps: int) -> nn.Module:
    """A model in the course of training: SGD until the loss is below one half, for so many steps at most."""
    with streams.isolated(0, "benchmark"):
        model = build_model(name, SHAPE, CLASSES)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        chosen = torch.arange(step * 50, step * 50 + 50) % len(data[1])
        optimiser.zero_grad()
        loss = F.cross_entropy(model(data[0][chosen]), data[1][chosen])
        loss.backward()
        optimiser.step()
        if loss.item() < 0.5:
            break
    return model


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratio(over: Callable[[], object], under: Callable[[], object], repeats: int) -> float:
    """Median of the quotients of neighbouring measurements, so that a slow spell of the machine hits both."""
    over(), under()
    return statistics.median(seconds(over) / seconds(under) for _ in range(repeats))


def product_ratios(model: nn.Module, data: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """A product over a gradient: with graphs kept, and where the memory allows none to be kept."""
    found = {}
    for label, memory in (("kept", 8.0), ("not kept", 1e-3)):
        with opened(model, data, Protocol(memory=memory, batch_size=32)) as problem, Hessian(problem) as hessian:
            vector = streams.stream(0, "vector").normal(hessian.size)
            found[label] = ratio(lambda: hessian(vector), problem.evaluate, repeats)  # noqa: B023
    return found


def worker_ratios(model: nn.Module, data: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """One worker over two."""
    one, two = Protocol(memory=8.0), Protocol(memory=8.0, workers=2)
    with opened(model, data, one) as a, opened(model, data, two) as b, Hessian(a) as alone, Hessian(b) as both:
        vector = streams.stream(0, "vector").normal(alone.size)
        products = ratio(lambda: alone(vector), lambda: both(vector), repeats)
        points, origin, away = [[i / 8] for i in range(8)], a.flat.theta.clone(), torch.randn_like(a.flat.theta)
        landscapes = ratio(
            lambda: score_points(a, None, points, origin, [away]),
            lambda: score_points(b, None, points, origin, [away]),
            repeats,
        )
    return {"products": products, "landscapes": landscapes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn64")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60, help="of training before, at most")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = pictures(arguments.samples)
    model = trained(arguments.model, data, arguments.steps)
    products = product_ratios(model, data, arguments.repeats)
    for label, value in products.items():
        print(f"a Hessian product, graphs {label}: {value:.2f} gradients [2.6]", flush=True)
    workers = worker_ratios(model, data, arguments.repeats)
    for label, value in workers.items():
        print(f"two workers on {label}: {value:.2f} times one [1.8]", flush=True)
    top = curvature(model, data, k=20, trace=False, memory=8.0)
    worst = float(top.residuals.max() / top.eigenvalues[0])
    print(f"20 eigenvalues to {worst:.1e} of the largest: {top.products} products [80]", flush=True)
    print(json.dumps({"product": products, "workers": workers, "products for 20": top.products, "residual": worst}))


if __name__ == "__main__":
    main()
