"""Nobody takes another client's number, claims a weight, or decides for others what the model is."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, same
from torch import Tensor

import fedflat
from fedflat import Experiment, Federation, InputError, Run
from fedflat.core.views import Update
from fedflat.errors import RunError

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, Context, Message

from fedflat.cli import main
from fedflat.flower import Admission, client_app, server_app
from fedflat.flower.identity import fresh_nonce, private_key, public_text, sign, verified_key
from fedflat.flower.members import Members
from fedflat.flower.validation import RefusedError

from .loopback import Loopback, Tamper, instruction, start
from .trials import deployed, federation, trial

Data = Callable[[Context], Any]


def honest(context: Context) -> Any:
    number = int(context.node_config["partition-id"])
    return blobs((6, 10, 14, 8)[number], seed=number)


def ran(folder: Path, data: Data = honest, *, nodes: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> Loopback:
    """A grid on which a small experiment was run."""
    experiment = options.pop("experiment", trial(rounds=1, participation="all"))
    grid = Loopback(client_app(experiment, data=data, state=folder / "state"), nodes, options.pop("tamper", None))
    grid.configs = options.pop("configs", {})
    options = {"wait": 0.1, "timeout": 0.1, "admission": Admission(classes=3), "out": folder / "run"} | options
    start(server_app(experiment, **options), grid)
    return grid


# ---- identities ----


def test_a_signature_is_of_this_hello_and_of_all_that_it_says(tmp_path: Path) -> None:
    key, nonce, told = private_key(tmp_path / "key", make=True), fresh_nonce(), {"client": 3, "samples": 10}
    told |= {"key": public_text(key)}
    signed = told | {"signature": sign(key, nonce, told)}
    assert verified_key(nonce, signed) == public_text(key)
    for wrong_nonce, wrong in ((fresh_nonce(), signed), (nonce, signed | {"samples": 11}), (nonce, told)):
        with pytest.raises(RefusedError, match="signed"):
            verified_key(wrong_nonce, wrong)


def test_a_number_belongs_to_the_key_with_which_it_first_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the client is away, and after a restart of the server."""
    ran(tmp_path)
    experiment = trial(rounds=2, participation="all")
    thief = {100: {"state": str(tmp_path / "thief")}}
    grid = Loopback(client_app(experiment, data=honest, state=tmp_path / "state"), range(4))
    grid.configs = thief
    members = Members(grid, trial(rounds=1, participation="all"), Admission(classes=3), tmp_path / "run")
    grid.app = client_app(trial(rounds=1, participation="all"), data=honest, state=tmp_path / "state")
    members.gather(0.0)
    assert sorted(members.nodes) == [1, 2, 3]
    assert "node 100 cannot join: it says it is client 0, which joined with another key" in caplog.text


def test_a_listed_key_is_of_one_client_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Client 1 has a key that may join, and says that it is client 0."""
    keys = {n: public_text(private_key(tmp_path / f"node-{n}", make=True)) for n in range(4)}
    configs = {100 + n: {"key": str(tmp_path / f"node-{max(1, n)}")} for n in range(4)}
    with pytest.raises(RunError, match="in vain for clients 0 of 4"):
        ran(tmp_path, admission=Admission(classes=3, keys=keys), configs=configs)
    assert "node 100 cannot join: it says it is client 0, and has not the key of that client" in caplog.text
    with pytest.raises(InputError, match="two clients have the same key"):
        Admission(keys={0: keys[1], 1: keys[1]})


# ---- sizes ----


class Boaster:
    """Many samples, as its client says: the same few again and again."""

    def __init__(self, count: int) -> None:
        self.count, (self.x, self.y) = count, blobs(8)

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices % len(self.x)], self.y[indices % len(self.x)]


def boasting(context: Context) -> Any:
    return Federation([Boaster(10**5)], classes=3) if context.node_config["partition-id"] == 0 else honest(context)


def test_a_size_that_only_its_client_states_has_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lower median of 8, 10, 14 and 100,000 is 10, of which twice as many count."""
    experiment = trial(rounds=1, participation="all", local_steps=1)
    ran(tmp_path, boasting, experiment=experiment)
    assert "client 0 says it has 100000 samples; 20 count" in caplog.text
    rows = {row["client"]: row["samples"] for row in fedflat.load_run(tmp_path / "run").clients}
    assert rows == {0: 20, 1: 10, 2: 14, 3: 8}


def test_another_size_than_the_listed_one_is_refused_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Admission(3, ((4,), torch.float64), ((), torch.int64), samples={0: 6, 1: 10, 2: 14, 3: 8})
    ran(tmp_path, boasting, admission=listed)
    assert "says, as client 0, that it has 100000 samples, and must have 6" in caplog.text
    run = fedflat.load_run(tmp_path / "run")
    assert [row["client"] for row in run.clients] == [1, 2, 3]
    assert run.metrics[0]["left_out"] == 1


def test_one_of_five_that_claims_a_weight_and_reverses_its_update_does_not_win(tmp_path: Path) -> None:
    known: dict[str, Any] = {"data": "digits", "partition": "iid", "model": "logistic", "clients": 5, "lr": 0.2}
    experiment = Experiment(**known, participation="all", rounds=6, local_steps=10)
    whole = fedflat.load_federation("digits", "iid", 5)

    class Liar(Boaster):
        def __init__(self) -> None:
            self.count, (self.x, self.y) = 10**6, whole.samples(0).batch(torch.arange(len(whole.samples(0))))

    def data(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        samples = Liar() if number == 0 else whole.samples(number)
        return Federation([samples], classes=10, preprocess=whole.preprocess)

    def reverse(message: Message, answer: Message) -> Message:
        sent = answer.content.array_records.get("update", {})
        if "delta" in sent and instruction(message)["client"] == 0:
            sent["delta"] = Array(-sent["delta"].numpy())
        return answer

    ran(tmp_path, data, nodes=(0, 1, 2, 3, 4), experiment=experiment, tamper=reverse, test=whole, admission=None)
    assert fedflat.load_run(tmp_path / "run").metrics[-1]["accuracy"] > 0.75


# ---- classes and forms ----


def test_no_client_decides_how_many_classes_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def many(context: Context) -> Any:
        x, y = honest(context)
        return (x, y * 499_999) if context.node_config["partition-id"] == 0 else (x, y)

    listed = Admission(3, ((4,), torch.float64), ((), torch.int64), samples={0: 6, 1: 10, 2: 14, 3: 8})
    ran(tmp_path, many, admission=listed)
    assert "says, as client 0, that it has 999999 classes of 3" in caplog.text
    assert fedflat.load_run(tmp_path / "run").weights.numel() == 15
    with pytest.raises(InputError, match="no client decides how many classes there are"):
        ran(tmp_path / "other", admission=None)


def test_the_first_to_join_decides_no_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def narrow(context: Context) -> Any:
        x, y = honest(context)
        return (x[:, :2], y) if context.node_config["partition-id"] == 0 else (x, y)

    ran(tmp_path, narrow)
    assert "client 0 has samples of another form than most others: it is left out of every round" in caplog.text
    assert [row["client"] for row in fedflat.load_run(tmp_path / "run").clients] == [1, 2, 3]


def test_a_list_of_clients_is_what_was_written(tmp_path: Path) -> None:
    key = public_text(private_key(tmp_path / "key", make=True))
    listed = Admission(10, ((1, 8, 8), torch.float32), ((), torch.int64), 2.5, {1: key}, {0: 7, 1: 12})
    (tmp_path / "clients.toml").write_text(listed.text())
    assert Admission.read(tmp_path / "clients.toml") == listed


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("max_weight = 0.5", "max_weight must be at least 1"),
        ("clases = 3", "clases is not known"),
        ("[client.0]\nkey = 'ssh-rsa nonsense'", "no public"),
        ("[client.0]\nsize = 3", "client.0.size is not known"),
        ("[client.zero]\nsamples = 3", "no list of clients"),
        ("x_shape = [3]", "no list of clients"),
        ("nonsense", "no list of clients"),
    ],
)
def test_a_wrong_list_is_one_clear_line(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "clients.toml").write_text(text)
    with pytest.raises(InputError, match=match):
        Admission.read(tmp_path / "clients.toml")


def test_a_project_lists_keys_and_sizes(tmp_path: Path) -> None:
    words = ["--data", "digits", "--model", "mlp", "--clients", "3", "--partition", "iid"]
    assert main(["deploy", "init", str(tmp_path / "project"), *words]) == 0
    listed = Admission.read(tmp_path / "project" / "clients.toml")
    assert listed.classes == 10 and sorted(listed.keys) == [0, 1, 2]
    assert list(listed.samples.values()) == fedflat.load_federation("digits", "iid", 3).sizes.tolist()
    own = (tmp_path / "project" / "keys" / "node-1.pub").read_text()
    assert own.startswith(listed.keys[1])


# ---- numbers from the wire ----


def altered(name: str, change: Callable[[np.ndarray], np.ndarray], **told: Any) -> Tamper:
    """Client 1 sends something else in round 2."""

    def tamper(message: Message, answer: Message) -> Message:
        asked = instruction(message)
        if (asked["client"], asked["round"], asked["kind"]) == (1, 2, "train"):
            sent = answer.content.array_records["update"]
            sent[name] = Array(change(sent[name].numpy()))
            answer.content.config_records["told"].update(told)
        return answer

    return tamper


@pytest.mark.parametrize(
    ("method", "tamper", "why"),
    [
        ("fedavg", altered("delta", lambda v: np.full_like(v, 3e38)), "beyond"),
        ("fedavg", altered("delta", lambda v: v * 1e4), "suspected of an attack"),
        ("fedavg", altered("delta", lambda v: v, steps=1000), "steps=1000"),
        ("fedavg", altered("delta", lambda v: v, seconds=-1.0), "seconds=-1.0"),
        ("fedavg", altered("delta", lambda v: v, loss=1e300), "loss=1e\\+300"),
        ("fednova", altered("sent/fednova/weights", lambda v: v * 0 + 1e-300), "step weights"),
        ("fednova", altered("sent/fednova/weights", lambda v: -v), "step weights"),
        ("fednova", altered("sent/fednova/weights", lambda v: v * 50), "step weights"),
        ("scaffold", altered("sent/scaffold/c", lambda v: v * 1e6), "suspected of an attack"),
    ],
)
def test_a_number_out_of_its_range_is_left_out_by_name(
    tmp_path: Path, method: str, tamper: Tamper, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    there, _ = deployed(tmp_path, trial(method, rounds=3, participation="all"), tamper)
    assert [row["left_out"] for row in there.metrics] == [0, 1, 0]
    assert [line for line in caplog.messages if "client 1 is left out" in line and re.search(why, line)]
    assert torch.isfinite(there.server_weights).all()


class Blunder(fedflat.Part):
    """A server step that fails in round 2, as an overflow would make it."""

    name = "blunder"

    def step(self, server: fedflat.Server, delta: Tensor) -> None:
        server.state(self)["steps"] = server.state(self).get("steps", torch.zeros(1)) + 1
        server.theta = server.theta + delta * (float("inf") if server.round == 2 else 1.0)


@dataclass(frozen=True)
class Flood(fedflat.Part):
    """Makes the server's state infinite in the first round."""

    name = "flood"

    def end_round(self, server: fedflat.Server) -> None:
        if server.round == 1:
            server.theta = server.theta + float("inf")


class Notes(fedflat.Callback):
    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def round(self, run: Run, metrics: Any) -> None:
        self.states.append({"theta": run.server_weights.clone(), "steps": run.server_state["blunder"]["steps"].clone()})


def test_a_round_with_a_bad_result_is_void_counted_and_leaves_the_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fedflat.register(Blunder)
    there, _ = deployed(tmp_path, trial("blunder", rounds=3, participation="all"), callbacks=[notes := Notes()])
    first, second, third = notes.states
    assert same(first, second) and not same(second, third)
    assert [row.get("void") for row in there.metrics] == [None, 1, None]
    assert "round 2 is void" in caplog.text and "is suspected: its update is the longest" in caplog.text


@pytest.mark.parametrize("method", ["fedexp", "fedgf", "dp(noise=0.0, quantile=0.5)"])
def test_a_void_round_ends_no_method_that_records_what_clients_sent(method: str, tmp_path: Path) -> None:
    fedflat.register(Flood)
    there, _ = deployed(tmp_path, trial(f"{method}+flood", rounds=2, participation="all"))
    assert [row.get("void") for row in there.metrics] == [1, None]


def test_dp_clips_again_on_the_server() -> None:
    part = fedflat.Method.parse("dp(clip=0.5, noise=0.0)").parts[0]
    server = fedflat.Server(fedflat.FlatModel(torch.nn.Linear(1, 1)), Experiment(participation="all"), 2)
    server.asked = 2
    sent = [torch.tensor([300.0, 400.0]), torch.tensor([0.3, 0.0])]
    made = part.combine(server, [Update(i, 1, 0.0, weight=0.5, delta=delta) for i, delta in enumerate(sent)])
    assert torch.allclose(made, torch.tensor([0.3, 0.2]))


# ---- secrets ----


def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    deployed(tmp_path, trial("dp(noise=0.5)+swa(start=0.5)", rounds=2))
    found = [path for place in ("run", "state") for path in (tmp_path / place, *(tmp_path / place).rglob("*"))]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert tmp_path / "run" / "flower.json" in found and tmp_path / "state" / "client-0.key" in found


def test_the_secret_seed_has_as_many_bits_as_a_key(tmp_path: Path) -> None:
    seeds = [Members(Loopback(client_app(trial(), data=federation()), []), trial(), Admission()).seed for _ in range(8)]
    assert len(set(seeds)) == 8 and max(seeds).bit_length() > 120
