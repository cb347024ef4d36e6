"""Which weights are evaluated: the server's, the participants' mean, or the mean over all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import flat, network, plain, same, world
from torch import Tensor
from torch.nn import functional as F

import fedflat
from fedflat import Part
from fedflat.errors import InputError

SIZES = (6, 10, 14, 8)
TURNS = [[0, 1], [1], [0, 2]]


def run(evaluated: str, rounds: int = 3, **changes: Any) -> fedflat.Run:
    exp = plain(rounds=rounds, evaluated=evaluated, **changes)
    return fedflat.run(exp, federation=world(SIZES), model=network(), participants=TURNS.__getitem__)


class Keep(Part):
    """Every client keeps its last local model, so that a test can look at it."""

    def end(self, local: Any) -> None:
        local.state(self)["last"] = local.theta.clone()


fedflat.register(Keep)


def latest(**changes: Any) -> list[Tensor]:
    """Each client's latest local model; the initial one where it never trained."""
    kept = run("server", method="keep", **changes)
    return [kept.client_state(i).get("keep", {}).get("last", flat(network())) for i in range(4)]


@pytest.mark.parametrize("evaluated", ["server", "auto"])
def test_server_is_the_model_sent_next(evaluated: str) -> None:
    result = run(evaluated)
    assert same(result.weights, result.server_weights)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_selected_is_the_mean_of_the_participants_models(weighting: str) -> None:
    weights = {0: 6, 2: 14} if weighting == "samples" else {0: 1, 2: 1}
    models = latest(weighting=weighting, server_lr=0.5)
    result = run("selected", weighting=weighting, server_lr=0.5)
    mean = sum(w * models[i] for i, w in weights.items()) / sum(weights.values())
    assert torch.allclose(result.weights, mean, rtol=0, atol=1e-14)
    assert not torch.allclose(result.weights, result.server_weights)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_all_is_the_mean_over_every_client_with_the_initial_model_for_those_never_heard(weighting: str) -> None:
    weights = SIZES if weighting == "samples" else (1, 1, 1, 1)
    models, result = latest(weighting=weighting), run("all", weighting=weighting)
    assert torch.equal(models[3], flat(network()))
    mean = sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights)
    assert torch.allclose(result.weights, mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("evaluated", ["selected", "all"])
def test_looking_does_not_change_the_training(evaluated: str) -> None:
    assert same(run(evaluated).server_weights, run("server").server_weights)


@pytest.mark.parametrize("evaluated", ["server", "selected", "all"])
def test_the_scores_are_those_of_the_evaluated_weights(evaluated: str) -> None:
    result, (x, y) = run(evaluated, server_lr=0.5), (world().test.x, world().test.y)
    with torch.no_grad():
        output = result.model(x)
    assert same(flat(result.model), result.weights)
    assert result.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-13)
    assert result.metrics[-1]["accuracy"] == (output.argmax(1) == y).double().mean().item()


def test_averaged_needs_a_part_that_averages() -> None:
    with pytest.raises(InputError, match="no part of 'fedavg' makes an average"):
        run("averaged")


@dataclass(frozen=True)
class Zeros(Part):
    """From the second round on, evaluate zeros."""

    def evaluation_weights(self, server: Any) -> Tensor | None:
        return torch.zeros_like(server.theta) if server.round > 1 else None


fedflat.register(Zeros)


@pytest.mark.parametrize("evaluated", ["auto", "averaged"])
def test_a_parts_average_is_evaluated_once_there_is_one(evaluated: str) -> None:
    first = run(evaluated, rounds=1, method="zeros")
    assert same(first.weights, first.server_weights)
    later = run(evaluated, method="zeros")
    assert not later.weights.any()
    assert later.server_weights.any()
    assert same(run("server", method="zeros").weights, later.server_weights)


@pytest.mark.parametrize("evaluated", ["selected", "all"])
def test_the_average_survives_a_resume(tmp_path: Any, evaluated: str) -> None:
    class Stop(fedflat.Callback):
        def round(self, run: Any, metrics: Any) -> bool:
            return metrics["round"] == 2

    exp = plain(rounds=3, evaluated=evaluated)
    given: dict[str, Any] = {"federation": world(SIZES), "model": network(), "participants": TURNS.__getitem__}
    fedflat.run(exp, out=tmp_path / "run", callbacks=[Stop()], **given)
    assert same(fedflat.run(exp, out=tmp_path / "run", **given).weights, run(evaluated).weights)
