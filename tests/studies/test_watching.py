"""What is recorded during a run: the numbers of the analyses themselves, and no trace in the result."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from helpers import blobs, network, plain, same, world
from torch import Tensor

import fedflat
from fedflat import InputError, Local, Part, analysis
from fedflat.studies.rounds import accuracy_over_rounds

ALL = (
    *("drift", "gsnr", "gsnr_first", "epoch_norms", "client_curvature", "feature_norms"),
    *("global_feature_norms", "global_curvature", "interference"),
)


def with_tests() -> fedflat.Federation:
    return world(client_tests=[blobs(9, seed=i + 50) for i in range(3)])


def watched(names: tuple[str, ...] = ALL, federation: fedflat.Federation | None = None, **options: Any) -> fedflat.Run:
    every = options.pop("watch_every", 1)
    experiment = plain(**({"rounds": 4, "method": "scaffold", "lr": 0.1} | options))
    return fedflat.run(
        experiment, federation=federation or with_tests(), model=network(), watch=names, watch_every=every
    )


@fedflat.register
class Updates(Part):
    """Sends every client's update apart."""

    name = "test_updates"

    def end(self, local: Local) -> None:
        local.send(self, **{f"client{local.client}": local.theta - local.origin})

    def end_round(self, server: Any) -> None:
        server.state(self).update(server.total(self))


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_looking_changes_no_bit_of_the_result(backend: str) -> None:
    quiet, seen = watched((), backend=backend, evaluate_clients=1), watched(ALL, backend=backend, evaluate_clients=1)
    assert same(quiet.server_weights, seen.server_weights)
    assert same(quiet.server_state, seen.server_state)
    assert all(same(quiet.client_state(i), seen.client_state(i)) for i in range(3))
    assert quiet.evaluations == seen.evaluations
    assert [row["accuracy"] for row in quiet.metrics] == [row["accuracy"] for row in seen.metrics]


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_looking_at_stacked_clients_changes_no_bit_either(backend: str) -> None:
    """And it finds what it finds of the same clients one by one, but for rounding."""
    names = tuple(name for name in ALL if name != "epoch_norms")  # it trains clients one by one, and says so
    quiet, seen = watched((), backend=backend, stack=3), watched(names, backend=backend, stack=3)
    assert seen._state.setup.stack == 3 and same(quiet.server_weights, seen.server_weights)
    for mine, alone in zip(seen.clients, watched(names).clients, strict=True):
        figures = mine.keys() - {"seconds", "watch_seconds"}
        assert mine.keys() == alone.keys()
        assert all(mine[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5) for name in figures)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_drift_is_that_of_the_updates(weighting: str) -> None:
    run = watched(("drift",), rounds=1, method="test_updates", weighting=weighting)
    deltas: list[Tensor] = [run.server_state["test_updates"][f"client{i}"] for i in range(3)]
    weights = [6.0, 10.0, 14.0] if weighting == "samples" else [1.0] * 3
    row = run.metrics[-1]
    assert row["drift_diversity"] == pytest.approx(analysis.drift_diversity(deltas, weights), rel=1e-9)
    assert row["consistency"] == pytest.approx(analysis.client_consistency(deltas, weights), rel=1e-9)
    centred = analysis.client_consistency(deltas, weights, centred=True)
    assert row["consistency_centred"] == pytest.approx(centred, rel=1e-9)


def test_feature_norms_of_the_global_model_are_taken_over_the_data_of_all_clients() -> None:
    run = watched(("global_feature_norms",), rounds=1, method="fedavg", participation="uniform(1)")
    row, data = run.metrics[-1], [with_tests().samples(i) for i in range(3)]
    norms = [analysis.feature_norm(run.model, own.batch(torch.arange(len(own)))) for own in data]
    assert row["global_feature_norm"] == pytest.approx(sum(norms) / 3, rel=1e-6)
    assert row["global_feature_norm_lowest"] == pytest.approx(min(norms), rel=1e-6)
    assert row["global_feature_norm_highest"] == pytest.approx(max(norms), rel=1e-6)
    with pytest.raises(InputError, match="there is no global model"):
        watched(("global_feature_norms",), rounds=1, method="fedrep")


def test_norms_and_signal_of_a_client_begin_at_the_model_received_and_end_at_the_model_sent() -> None:
    lone = fedflat.Federation([blobs(12)], test=blobs(30, seed=1000))
    names = ("drift", "gsnr", "gsnr_first", "epoch_norms", "global_curvature")
    run = watched(names, lone, rounds=1, method="fedavg", local_epochs=3, batch_size=5)
    row, data = run.clients[-1], blobs(12)
    assert row["norm_epoch_3"] == pytest.approx(row["norm"], rel=1e-6)
    assert row["cosine_epoch_3"] == pytest.approx(row["cosine"], rel=1e-6) and "norm_epoch_4" not in row
    assert row["gsnr_first_sum"] == pytest.approx(analysis.gsnr(network(), data).total, rel=1e-6)
    found = analysis.curvature(run.model, data, k=1)
    assert run.metrics[-1]["global_lambda_max"] == pytest.approx(float(found.eigenvalues[0]), rel=1e-3)
    assert run.metrics[-1]["global_train_loss"] == pytest.approx(found.conditions.loss, rel=1e-6)


def test_a_lone_clients_figures_are_those_of_the_model_it_makes() -> None:
    """With one client the server's model is the client's, so both can be looked at afterwards."""
    lone = fedflat.Federation([blobs(12)], test=blobs(30, seed=1000))
    run = watched(("drift", "gsnr", "client_curvature", "feature_norms"), lone, rounds=1, method="fedavg")
    row, start, data = run.clients[-1], network(), blobs(12)
    weights = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    assert row["norm"] == pytest.approx(float(run.weights.norm()), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(run.weights, weights, dim=0)
    assert row["cosine"] == pytest.approx(float(cosine), rel=1e-9)
    top = analysis.curvature(run.model, data, k=1, trace=False).eigenvalues[0]
    assert row["lambda_max"] == pytest.approx(float(top), rel=1e-6)
    assert row["gsnr_sum"] == pytest.approx(analysis.gsnr(run.model, data).total, rel=1e-9)
    assert row["feature_norm"] == pytest.approx(analysis.feature_norm(run.model, data), rel=1e-9)


def test_only_the_chosen_rounds_and_the_last_are_looked_at_and_the_cost_is_reported() -> None:
    run = watched(rounds=5, watch_every=2)
    looked = {row["round"] for row in run.clients if "lambda_max" in row}
    assert looked == {2, 4, 5} == {row["round"] for row in run.evaluations}
    for row in run.metrics:
        cost = sum(client.get("watch_seconds", 0.0) for client in run.clients if client["round"] == row["round"])
        assert row.get("watch_seconds", 0.0) == pytest.approx(cost, abs=1e-5)
        assert (cost > 0) == (row["round"] in looked)


def test_a_client_that_cannot_be_looked_at_stops_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """The gradient of one sample has no variance."""
    lonely = fedflat.Federation([blobs(1), blobs(12)], test=blobs(30, seed=1000))
    run = watched(("gsnr", "drift"), lonely, rounds=1)
    assert ["gsnr_sum" in row for row in run.clients] == [False, True] and all("norm" in row for row in run.clients)
    assert "no gsnr of client 0 in round 1: a variance needs two samples or more" in caplog.text


def test_accuracy_over_rounds_is_what_was_recorded() -> None:
    """A[t, k] of the common model on each client's test data; forgetting is measured from the best before the last."""
    run = watched(("interference",), rounds=4, lr=1.5)
    found = accuracy_over_rounds(run)
    table = [[row["common"] for row in run.evaluations if row["round"] == t] for t in (1, 2, 3, 4)]
    assert (found.rounds, found.clients, found.by_client.tolist()) == ([1, 2, 3, 4], [0, 1, 2], table)
    expected = [max(column[:3]) - column[3] for column in zip(*table, strict=True)]
    assert found.forgotten.tolist() == pytest.approx(expected, abs=1e-12)
    curve = [row["accuracy"] for row in run.metrics]
    assert (found.final, found.best) == (curve[-1], max(curve)) and found.best_round == curve.index(max(curve)) + 1
    assert found.tail == pytest.approx(sum(curve) / 4) and found.curve == list(enumerate(curve, start=1))
    assert found.plot().axes and json.loads(json.dumps(found.to_dict(), allow_nan=False))["clients"] == [0, 1, 2]


def test_without_evaluations_of_clients_nothing_is_said_of_them() -> None:
    found = accuracy_over_rounds(watched((), world(), rounds=1))
    assert found.clients == [] and math.isnan(found.mean_forgotten) and len(found.plot().axes) == 1


def test_bad_input_is_answered() -> None:
    with pytest.raises(InputError, match="did you mean 'drift'"):
        watched(("drif",))
    with pytest.raises(InputError, match="watch_every must be 1 or more"):
        watched(("drift",), watch_every=0)
    with pytest.raises(InputError, match="test data of their own"):
        watched(("interference",), world())
