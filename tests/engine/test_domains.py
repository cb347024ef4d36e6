"""SiLoBN's test statistics: by the sample's domain where clients of it have trained, by the batch elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat

SHIFTS = {"a": 0.0, "b": 8.0, "c": -5.0}  # where the inputs of a domain lie


def samples(domain: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return x + SHIFTS[domain], (x[:, 0] > 0).long()


def federation(domains: bool = True) -> fedflat.Federation:
    """Two clients of domain a, one of b, one that mixes both; nobody holds c. Test samples of all three, in turns."""
    held = [samples("a", 8, 0), samples("a", 16, 1), samples("b", 8, 2), samples("b", 8, 3)]
    parts = [samples(domain, 6, 9) for domain in "abc"]
    x, y = (torch.stack([part[i] for part in parts], 1).flatten(0, 1) for i in (0, 1))
    test = {"all": (x, y), "clean": parts[0]}
    more = {"domains": ["a", "a", "b", ""], "test_domains": {"all": list("abc" * 6)}} if domains else {}
    return fedflat.Federation(held, test, classes=2, **more)  # type: ignore[arg-type]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


def run(policy: str, backend: str = "serial", domains: bool = True) -> fedflat.Run:
    e = fedflat.Experiment(rounds=2, batch_size=4, lr=0.1, batchnorm=policy, backend=backend, participation="all")
    return fedflat.run(e, federation=federation(domains), model=network())


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_statistics_are_those_of_the_samples_domain(backend: str) -> None:
    done = run("silobn_by_domain", backend)
    kept = [done.client_state(client)["private"]["buffers"] for client in range(4)]
    statistics = {"a": (8 * kept[0] + 16 * kept[1]) / 24, "b": kept[2]}
    model, total = copy.deepcopy(done.model).eval(), 0.0
    affine, head = model[0], model[1]  # type: ignore[index]
    for domain in "abc":
        x, y = samples(domain, 6, 9)
        mean, var = statistics[domain].split(3) if domain in statistics else (x.mean(0), x.var(0, unbiased=False))
        out = head((x - mean) / (var + 1e-5).sqrt() * affine.weight + affine.bias)
        total += F.cross_entropy(out, y, reduction="sum").item()
    assert done.metrics[-1]["loss"] == pytest.approx(total / 18, rel=1e-5)


def test_without_domains_it_is_silobn() -> None:
    plain, by = run("silobn"), run("silobn_by_domain", domains=False)
    assert plain.weights.equal(by.weights) and plain.metrics[-1]["loss"] == by.metrics[-1]["loss"]
    here = run("silobn_by_domain")
    assert here.weights.equal(plain.weights) and here.metrics[-1]["loss"] != plain.metrics[-1]["loss"]
    assert here.metrics[-1]["clean_loss"] == plain.metrics[-1]["clean_loss"]  # a test set whose domains nobody told
