"""Privacy and robustness in a deployment: promises hold with clients that fail, and against clients that attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEFENCES

import fedflat
from fedflat import Experiment, Run
from fedflat.parts import accountant

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, Message

from fedflat.flower import client_app, named_data, server_app

from .loopback import Loopback, Tamper, instruction, start
from .trials import deployed, simulated, trial

# ---- privacy ----


@pytest.mark.parametrize("law", ["all", "uniform(3)", "bernoulli(0.6)"])
def test_neither_noise_nor_epsilon_depend_on_who_is_heard(tmp_path: Path, law: str) -> None:
    """Clients that do not move leave the noise alone in the model: one is silent in round 2, all of them in round 3."""
    experiment = trial("dp(noise=0.5)+fedavgm", participation=law, lr=0.0)

    def silent(message: Message, answer: Message) -> Message | None:
        round, client = instruction(message)["round"], instruction(message)["client"]
        return None if round == 3 or (round, client) == (2, 1) else answer

    here, (there, _) = simulated(experiment), deployed(tmp_path, experiment, silent, seed=experiment.seed)
    assert there.metrics[2]["clients"] == 0
    assert torch.allclose(here.server_weights, there.server_weights, rtol=1e-12, atol=0)
    assert [row["epsilon"] for row in there.metrics] == [row["epsilon"] for row in here.metrics]


def test_a_client_that_is_left_out_counts_as_one_that_sends_zeros(tmp_path: Path) -> None:
    """Which is the one whose privacy the stated epsilon is about."""
    experiment = trial("dp(clip=0.1, noise=0.5)", participation="all")
    away: Tamper = lambda message, answer: None if instruction(message)["client"] == 0 else answer  # noqa: E731
    there, _ = deployed(tmp_path, experiment, away, seed=experiment.seed)
    here = simulated(experiment.replace(method=f"{experiment.method}+attack(kind='noise', clients=1, scale=0.0)"))
    assert [row["left_out"] for row in there.metrics] == [1] * 4
    assert torch.allclose(here.server_weights, there.server_weights, rtol=1e-12, atol=0)


def test_participants_that_the_server_names_count_as_no_sampling(tmp_path: Path) -> None:
    experiment = trial("dp(noise=2.0)", participation="bernoulli(0.1)", rounds=2)
    there, _ = deployed(tmp_path, experiment, participants=lambda t: [t])
    assert there.metrics[-1]["epsilon"] == accountant.epsilon(2 * accountant.gaussian(2.0), 1e-5)


def test_with_noise_the_server_draws_from_a_seed_that_no_client_knows(tmp_path: Path) -> None:
    """Also after a restart. Clients take all samples at once, so that all draws that count are the server's."""
    experiment = trial("dp(noise=0.5)", batch_size=0, participation="bernoulli(0.5)")
    there, grid = deployed(tmp_path, experiment)
    seed = there.experiment.seed
    assert seed != experiment.seed
    here = simulated(experiment.replace(seed=seed))
    assert torch.allclose(here.server_weights, there.server_weights, rtol=1e-9, atol=0)
    records = [record for m in grid.messages if m.has_content() for record in m.content.config_records.values()]
    assert records and not any(seed in record.values() for record in records)
    again, _ = deployed(tmp_path, experiment)
    assert again.experiment.seed == seed
    other, _ = deployed(tmp_path / "other", experiment)
    assert other.experiment.seed not in (seed, experiment.seed)


# ---- attackers ----


def digits(folder: Path, method: str, tamper: Tamper, **changes: Any) -> Run:
    """Clients with real digits, dealt out at random."""
    known: dict[str, Any] = {"data": "digits", "partition": "iid", "model": "mlp(hidden=32)", "participation": "all"}
    known |= {"clients": 10, "rounds": 5, "batch_size": 16, "local_epochs": 2, "lr": 0.2}
    experiment = Experiment(method=method, **known | changes)
    data = named_data(experiment)
    grid = Loopback(client_app(experiment, data=data, state=folder / "state"), range(experiment.clients), tamper)
    start(server_app(experiment, test=data, out=folder / "run", wait=5, timeout=5), grid)
    return fedflat.load_run(folder / "run")


def attack(factors: dict[int, float]) -> Tamper:
    """Some clients send their updates so many times as large."""

    def tamper(message: Message, answer: Message) -> Message:
        sent = answer.content.array_records.get("update", {})
        if "delta" in sent and instruction(message)["client"] in factors:
            sent["delta"] = Array(sent["delta"].numpy() * np.float32(factors[instruction(message)["client"]]))
        return answer

    return tamper


def test_two_attackers_spoil_a_mean(tmp_path: Path) -> None:
    assert digits(tmp_path, "fedavg", attack({3: -10.0, 7: -10.0})).metrics[-1]["accuracy"] < 0.3


@pytest.mark.parametrize("factor", [1e4, 1e37])
def test_an_update_out_of_all_proportion_is_left_out_by_the_name_of_its_sender(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, factor: float
) -> None:
    run = digits(tmp_path, "fedavg", attack({3: factor}), rounds=3)
    assert [row["left_out"] for row in run.metrics] == [1, 1, 1]
    assert run.metrics[-1]["accuracy"] > 0.6
    assert caplog.text.count("client 3 is left out") == 3
    assert ("suspected of an attack" if factor < 1e12 else "beyond ±1e+12") in caplog.text


@pytest.mark.parametrize("defence", DEFENCES)
def test_they_do_not_spoil_a_robust_combination(tmp_path: Path, defence: str) -> None:
    """One sends its update reversed and ten times as large, the other as large as a number can be."""
    assert digits(tmp_path, defence, attack({3: -10.0, 7: 1e37})).metrics[-1]["accuracy"] > 0.85


def test_a_round_with_too_few_for_its_defence_is_void_and_the_next_one_is_not(tmp_path: Path) -> None:
    """So that an attacker who sends garbage cannot stop the training."""

    def tamper(message: Message, answer: Message) -> Message:
        return attack({1: np.nan})(message, answer) if instruction(message)["round"] == 2 else answer

    run = digits(tmp_path, "krum(attackers=1)", tamper, clients=5, rounds=3)
    first, second, third = run.metrics
    assert [row["left_out"] for row in run.metrics] == [0, 1, 0]
    assert first["accuracy"] == second["accuracy"] != third["accuracy"]
