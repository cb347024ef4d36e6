"""Every client's models on its own test data: the table, its summary, new clients, clients never drawn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, network, plain
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Federation, InputError, load_federation, load_run
from fedflat.core.streams import stream
from fedflat.data.indices import Split, matching_tests
from fedflat.data.pooled import PooledClients
from fedflat.data.samples import labels_of
from fedflat.errors import UnknownNameError
from parts.personal.federations import SIZES, SMALL_NET, accuracy, federation, go, labelled, own_test

NAMES = ("mean", "std", "min", "max", "low5", "top5")


def last_rows(run: Any) -> dict[int, dict[str, Any]]:
    return {row["client"]: row for row in run.evaluations if row["round"] == len(run.metrics)}


# ---- the table and its summaries ----


def test_the_common_model_is_scored_on_every_clients_own_test_data() -> None:
    run = go("fedavg", network())
    rows = last_rows(run)
    assert rows.keys() == set(range(len(SIZES)))
    for i, row in rows.items():
        assert row["common"] == pytest.approx(accuracy(run.model, own_test(i)), abs=1e-12)
        assert row["personal"] is None and row["adapted"] is None
        assert row["samples"] == len(own_test(i)[1]) and not row["new"]
    assert len({row["common"] for row in rows.values()}) > 1


def test_the_metrics_summarise_the_table() -> None:
    run = go("ditto(lam=0.5)", network())
    rows, metrics = last_rows(run), run.metrics[-1]
    common = [row["common"] for row in rows.values()]
    personal = [row["personal"] for row in rows.values() if row["personal"] is not None]
    assert len(personal) == 4  # client 3 was never drawn
    for prefix, values in (("clients", common), ("personal", personal)):
        expected = (np.mean(values), np.std(values), min(values), max(values), min(values), max(values))
        assert [metrics[f"{prefix}_{name}"] for name in NAMES] == pytest.approx(expected)


def test_the_last_evaluation_is_summarised_and_each_model_by_its_name() -> None:
    run = go("ditto(lam=0.5)", network(), evaluate_clients=1)
    rows = last_rows(run)
    personal = sorted(row["personal"] for row in rows.values() if row["personal"] is not None)
    assert run.fairness().accuracies == pytest.approx(personal)
    assert run.fairness(model="common").accuracies == pytest.approx(sorted(row["common"] for row in rows.values()))
    with pytest.raises(InputError, match="adapted"):
        run.fairness(model="adapted")
    with pytest.raises(UnknownNameError, match="personal"):
        run.fairness(model="persnal")


def test_without_personal_models_the_common_one_is_summarised() -> None:
    run = go("fedavg", network())
    assert run.fairness() == run.fairness(model="common")


def test_clients_that_were_never_drawn_are_reported_apart() -> None:
    run = go("fedavg", network())
    rows = last_rows(run)
    assert {i for i, row in rows.items() if row["seen"]} == {0, 1, 2, 4}
    assert run.fairness(seen=False).accuracies == (rows[3]["common"],)
    assert run.fairness(seen=True).accuracies == tuple(sorted(rows[i]["common"] for i in (0, 1, 2, 4)))


def test_who_has_been_seen_grows_from_round_to_round() -> None:
    run = go("fedavg", network(), evaluate_clients=1)
    seen = {t: {row["client"] for row in run.evaluations if row["round"] == t and row["seen"]} for t in (1, 2, 3)}
    assert seen == {1: {0, 1, 2}, 2: {0, 1, 2, 4}, 3: {0, 1, 2, 4}}


@pytest.mark.parametrize(("every", "rounds"), [(0, [5]), (2, [2, 4, 5]), (1, [1, 2, 3, 4, 5]), (None, [])])
def test_how_often(every: int | None, rounds: list[int]) -> None:
    run = go("ditto", network(), rounds=5, evaluate_clients=every)
    assert sorted({row["round"] for row in run.evaluations}) == rounds
    assert [row["round"] for row in run.metrics if "clients_mean" in row] == rounds
    assert [row["round"] for row in run.metrics if "personal_top5" in row] == rounds


def test_the_table_is_in_the_run_folder(tmp_path: Path) -> None:
    run = go("ditto", network(), out=tmp_path / "run")
    again = load_run(tmp_path / "run", model=network())
    assert again.evaluations == run.evaluations == go("ditto", network()).evaluations
    assert again.fairness() == run.fairness()


def test_a_client_without_test_data_has_no_row_and_the_others_do() -> None:
    tests: list[Any] = [own_test(0), None, own_test(2), None, None]
    data = Federation([labelled(n, i, i) for i, n in enumerate(SIZES)], client_tests=tests)
    run = go("ditto", network(), data)
    assert last_rows(run).keys() == {0, 2}
    assert len(run.fairness().accuracies) == 2


def test_an_empty_test_set_of_a_client_is_refused() -> None:
    tests: list[Any] = [own_test(0), None, own_test(2), (torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), None]
    data = Federation([labelled(n, i, i) for i, n in enumerate(SIZES)], client_tests=tests)
    with pytest.raises(InputError, match="test set of client 3 is empty; give None"):
        go("ditto", network(), data)


def test_clients_to_whom_no_test_sample_falls_are_told(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.zeros(4, 1), torch.tensor([0, 0, 1, 1])
    sets, held = Split.of([np.array([0, 1]), np.array([2, 3])]), Split.of([np.array([0]), np.array([], np.int64)])
    Federation(PooledClients(x, y, sets), client_tests=PooledClients(x, y, held)).check()
    assert "1 of 2 clients (1)" in caplog.text


HALF_MADE = f"pfedhn({SMALL_NET}, local_head=True)"


@pytest.mark.parametrize("method", ["fedrep(head_epochs=2)", "fedper", "lg_fedavg", "local_only", HALF_MADE])
def test_a_client_that_was_never_drawn_and_has_no_model_is_judged_adapted(method: str) -> None:
    run = go(method, network())
    rows = last_rows(run)
    assert rows[3]["personal"] is None and rows[3]["common"] is None
    assert [i for i, row in rows.items() if row["adapted"] is not None] == [3]
    assert run.fairness("adapted", seen=False).accuracies == (rows[3]["adapted"],)
    with pytest.raises(InputError, match="they have: adapted"):
        run.fairness(seen=False)


def test_a_hypernetwork_has_no_common_model_for_a_client() -> None:
    rows = last_rows(go("pfedhn", network()))
    assert all(row["common"] is None and row["personal"] is not None for row in rows.values())


def test_without_test_data_nothing_is_evaluated_and_the_summary_says_what_to_do() -> None:
    run = go("ditto", network(), federation(with_tests=False))
    assert run.evaluations == [] and "clients_mean" not in run.metrics[-1]
    with pytest.raises(InputError, match="test data"):
        run.fairness()


# ---- adapted ones, by hand ----


def fitted(
    module: nn.Module, samples: tuple[Tensor, Tensor], t: int, client: int, epochs: int, only: str = "", **e: float
) -> nn.Module:
    """Momentum SGD on a client's data in the order of round t; `only` is a prefix of the parameters to train."""
    module, (x, y) = copy.deepcopy(module).train(), samples
    chosen = [p for name, p in module.named_parameters() if name.startswith(only)]
    velocity = [torch.zeros_like(p) for p in chosen]
    order = stream(0, "batches", t, client)
    for _ in range(epochs):
        for rows in torch.split(order.permutation(len(y)), 4):
            gradients = torch.autograd.grad(F.cross_entropy(module(x[rows]), y[rows]), chosen)
            with torch.no_grad():
                for p, v, g in zip(chosen, velocity, gradients, strict=True):
                    v.mul_(e["momentum"]).add_(g + e["weight_decay"] * p)
                    p.sub_(e["lr"] * v)
    return module.eval()


RATES = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01}


def by_hand(run: Any, client: int, epochs: int, only: str = "") -> float:
    tuned = fitted(run.model, labelled(SIZES[client], client, client), 3, client, epochs, only, **RATES)
    return accuracy(tuned, own_test(client))


@pytest.mark.parametrize(
    ("method", "epochs", "only"),
    [
        ("finetune(epochs=3)", 3, ""),
        ("fedbabu(epochs=3)", 3, ""),
        ("fedbabu(epochs=3, tune='head')", 3, "2."),
        ("fedbabu(epochs=3, tune='body')", 3, "0."),
        ("finetune(epochs=0)", 0, ""),
    ],
)
def test_tuning_at_evaluation_is_so_many_epochs_of_local_sgd(method: str, epochs: int, only: str) -> None:
    run = go(method, network())
    rows = last_rows(run)
    assert len(rows) == len(SIZES)
    for i, row in rows.items():
        assert row["adapted"] == row["personal"] == pytest.approx(by_hand(run, i, epochs, only), abs=1e-12)
    if epochs:
        untuned = [accuracy(run.model, own_test(i)) for i in rows]
        assert untuned != [row["adapted"] for row in rows.values()]


def test_fine_tuning_leaves_the_training_alone() -> None:
    tuned, untuned = go("finetune(epochs=3)", network(), evaluate_clients=1), go("fedavg", network())
    assert torch.equal(tuned.server_weights, untuned.server_weights)
    assert all(tuned.client_state(i) == {} for i in range(len(SIZES)))


# ---- new clients ----


def newcomers(method: str, **changes: Any) -> Any:
    """Of seven clients the last two never train."""
    sizes = (*SIZES, 9, 7)
    return go(method, network(), federation(sizes), new_clients=2, **changes)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "fedrep(head_epochs=2)", "apfl"])
def test_new_clients_do_not_change_the_training(method: str) -> None:
    with_, without = newcomers(method), go(method, network())
    assert torch.equal(with_.server_weights, without.server_weights)
    assert with_.client_state(5) == {} and with_.client_state(6) == {}
    assert {row["client"] for row in with_.clients} == {0, 1, 2, 4}


def test_new_clients_are_never_drawn() -> None:
    e = plain(rounds=6, participation="uniform(2)", new_clients=3, method="ditto")
    run = fedflat.run(e, federation=federation(), model=network(), progress=False)
    assert {row["client"] for row in run.clients} == {0, 1}
    with pytest.raises(InputError, match="3"):
        fedflat.run(e.replace(participation="uniform(3)"), federation=federation(), model=network(), progress=False)


def test_new_clients_are_evaluated_with_and_without_adaptation() -> None:
    run = newcomers("fedavg")
    rows = last_rows(run)
    for i, size in ((5, 9), (6, 7)):
        assert rows[i]["new"] and not rows[i]["seen"]
        assert rows[i]["common"] == pytest.approx(accuracy(run.model, own_test(i)), abs=1e-12)
        tuned = fitted(run.model, labelled(size, i, i), 3, i, 2, **RATES)  # the experiment's local_epochs
        assert rows[i]["adapted"] == pytest.approx(accuracy(tuned, own_test(i)), abs=1e-12)
    assert all(rows[i]["adapted"] is None and not rows[i]["new"] for i in range(5))


def test_new_clients_are_summarised_apart() -> None:
    run = newcomers("fedavg")
    rows = last_rows(run)
    assert run.fairness(model="adapted", new=True).accuracies == tuple(sorted(rows[i]["adapted"] for i in (5, 6)))
    assert run.fairness(model="common", new=True).accuracies == tuple(sorted(rows[i]["common"] for i in (5, 6)))
    assert len(run.fairness(model="common").accuracies) == len(SIZES)
    old = [rows[i]["common"] for i in range(5)]
    assert run.metrics[-1]["clients_mean"] == pytest.approx(np.mean(old))


def test_a_new_client_of_fedrep_gets_a_head_of_its_own_on_the_common_body() -> None:
    run = newcomers("fedrep(head_epochs=2)")
    rows, server = last_rows(run), network()
    nn.utils.vector_to_parameters(run.server_weights, server.parameters())
    for i, size in ((5, 9), (6, 7)):
        tuned = fitted(server, labelled(size, i, i), 3, i, 2, "2.", **RATES)
        assert rows[i]["adapted"] == pytest.approx(accuracy(tuned, own_test(i)), abs=1e-12)


@pytest.mark.parametrize(
    "method", ["pfedhn(embedding=3, hidden=6)", "plgu_lf(layers=1)", "pfedme(lam=2.0)", "lg_fedavg"]
)
def test_every_kind_of_method_can_adapt_to_new_clients(method: str) -> None:
    rows = last_rows(newcomers(method))
    assert all(rows[i]["new"] and 0 <= rows[i]["adapted"] <= 1 for i in (5, 6))


def test_with_pfedme_too_a_new_client_is_adapted_by_the_experiments_optimiser() -> None:
    """Weight decay included: adaptation is local SGD on F, whatever the method did with the decay in training."""
    run = newcomers("pfedme(lam=2.0, steps=2, lr=0.1)", weight_decay=0.5)
    with_, without = (
        [
            accuracy(fitted(run.model, labelled(n, i, i), 3, i, 2, lr=0.3, momentum=0.5, weight_decay=d), own_test(i))
            for i, n in ((5, 9), (6, 7))
        ]
        for d in (0.5, 0.0)
    )
    assert with_ != without
    assert [last_rows(run)[i]["adapted"] for i in (5, 6)] == pytest.approx(with_, abs=1e-12)


@pytest.mark.parametrize(
    "base",
    [
        *("scaffold", "feddyn(alpha=0.1)", "feddc(alpha=0.1)", "mofedsam", "adabest", "fedspeed"),
        *("fedsmoo(rho=0.05)", "fedgloss(rho=0.05, rho_l=0.05)", "fedwmsam", "fedgf", "fedlesam", "fedsol(rho=0.1)"),
        *("fedntd", "fedlc", "feddecorr", "fedmoswa", "fedacg", "fedinit(variant='code')", "qfedavg", "fedexp"),
    ],
)
def test_models_can_be_tuned_at_evaluation_whatever_the_training_sends_along(base: str) -> None:
    run = go(f"{base}+finetune", network(), lr=0.05)
    assert all(0 <= row["adapted"] <= 1 for row in run.evaluations)
    assert torch.equal(run.server_weights, go(base, network(), lr=0.05).server_weights)


# ---- test sets of the partitioners ----

labels = np.random.default_rng(0).integers(0, 4, 400)
common_labels = np.random.default_rng(1).integers(0, 5, 150)  # class 4 is nobody's


def parts(*weights: list[float]) -> Split:
    """Clients that hold given shares of each class."""
    rng, held = np.random.default_rng(2), [[] for _ in weights]
    for c in range(4):
        rows = rng.permutation(np.flatnonzero(labels == c))
        share = np.array([w[c] for w in weights])
        edges = np.floor(np.cumsum(share) / share.sum() * len(rows)).astype(int)
        for client, part in enumerate(np.split(rows, edges[:-1])):
            held[client].append(part)
    return Split.of([np.concatenate(h) for h in held])


def test_a_clients_test_set_has_its_labels_in_its_proportions_and_nobody_elses_samples() -> None:
    sets = parts([1, 0, 2, 1], [1, 3, 0, 1], [0, 1, 1, 5])
    tests = matching_tests(sets, labels, common_labels, seed=0)
    chosen = [tests.indices(i) for i in range(3)]
    everything = np.concatenate(chosen)
    assert len(set(everything.tolist())) == len(everything)  # disjoint
    assert sorted(everything) == np.flatnonzero(common_labels < 4).tolist()  # all of the classes that anybody holds
    for i in range(3):
        for c in range(4):
            held = (labels[sets.indices(i)] == c).sum()
            found, available = (common_labels[chosen[i]] == c).sum(), (common_labels == c).sum()
            assert abs(found - available * held / (labels == c).sum()) < 1
            assert held or not found


def test_the_seed_alone_decides_who_gets_which_test_samples() -> None:
    sets = parts([1, 1, 1, 1], [1, 1, 1, 1])
    one, same_, other = (matching_tests(sets, labels, common_labels, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.flat, same_.flat)
    assert not np.array_equal(one.flat, other.flat) and np.array_equal(one.sizes, other.sizes)


@pytest.mark.parametrize(
    "partition",
    ["iid", "pathological(labels=2)", "dirichlet_equal(delta=0.3)", "lda_hsu(alpha=0.2)", "dirichlet_per_class"],
)
def test_every_partition_gives_its_clients_test_data_of_their_own_labels(partition: str) -> None:
    data = load_federation("digits", partition, 10, 0)
    counts, total = data.counts(), 0
    for i in range(10):
        test = data.client_test(i)
        assert test is not None
        found = np.bincount(labels_of(test).numpy(), minlength=data.classes)
        assert not found[counts[i] == 0].any()
        total += found.sum()
    assert data.test is not None
    assert total == len(data.test)


def test_local_holdout_takes_the_test_data_from_the_client_itself() -> None:
    whole, held = load_federation("digits", "iid", 8, 0), load_federation("digits", "iid", 8, 0, local_holdout=0.25)
    for i in range(8):
        test = held.client_test(i)
        assert test is not None
        assert len(test) + held.size(i) == whole.size(i)
        assert len(test) == whole.size(i) // 4


def test_the_common_test_set_is_still_scored() -> None:
    run = go("ditto", network())
    x, y = blobs(30, seed=1000)
    assert run.metrics[-1]["accuracy"] == pytest.approx(accuracy(run.model, (x, y)))
