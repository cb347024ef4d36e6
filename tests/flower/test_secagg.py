"""Secure aggregation: the server has the sum to the last unit, no single update, and clients may stay away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import restless

import fedflat
from fedflat import Experiment, InputError, Run
from fedflat.cli import main
from fedflat.core.tensors import flatten

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedflat[flower]'")

from flwr.app import Array, ConfigRecord, Context, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedflat.flower import client_app, secagg, server_app
from fedflat.flower.messages import Instruction
from fedflat.flower.secagg_client import Memory, send_secrets

from .fleet import fleet, wait_until
from .loopback import Loopback, Tamper, instruction, start
from .trials import SIZES, federation, kept_by, simulated, trial

UNIT = 2.0**-secagg.BITS


def summed(folder: Path, experiment: Experiment, tamper: Tamper | None = None, **options: Any) -> tuple[Run, Loopback]:
    """Run an experiment with masks."""
    held, own = federation(), options.pop("own", None)
    app = client_app(experiment, data=held, model=own, state=folder / "state", secagg=options.pop("masks", True))
    grid = Loopback(app, range(len(SIZES)), tamper)
    options = {"timeout": 0.05, "wait": 0.5, "secagg": True} | options
    start(server_app(experiment, test=held, model=own, out=folder / "run", **options), grid)
    return fedflat.load_run(folder / "run", model=own), grid


# ---- numbers, masks, neighbours ----


def test_a_sum_is_right_to_half_a_unit_for_each_term() -> None:
    terms = [torch.randn(500, dtype=torch.float64) * 10.0**k for k in range(-6, 4)]
    masks = [secagg.mask(bytes([k]) * 32, 500) for k in range(len(terms))]
    total = sum((secagg.quantised(t) + m for t, m in zip(terms, masks, strict=True)), np.zeros(500, np.uint64))
    total = total - sum(masks, np.zeros(500, np.uint64))
    assert float((secagg.restored(total) - sum(terms)).abs().max()) <= len(terms) * UNIT / 2 * (1 + 1e-3)
    with pytest.raises(InputError, match="beyond ±65536"):
        secagg.quantised(torch.tensor([1.0, 7e4]))
    with pytest.raises(InputError, match="beyond"):
        secagg.quantised(torch.tensor([torch.nan]))


def test_flowers_own_masks_come_from_28_bits_and_ours_from_256() -> None:
    """Why Flower's mod is not used: a shared key is folded to 32 bits, of which four are always 0."""
    keys = [secagg.new_key() for _ in range(5)]
    shared = [secagg.agreed(keys[0], secagg.public_of(key)) for key in keys[1:]]
    folded = [np.bitwise_xor.reduce(np.frombuffer(key, "<u4")) for key in shared]
    assert all(int(seed) & 0x80808080 == 0 for seed in folded)
    theirs = [pseudo_rand_gen(key, 1 << 32, [(8,)])[0] for key in (shared[0], int(folded[0]).to_bytes(4, "little"))]
    assert theirs[0].tolist() == theirs[1].tolist()
    one, other = bytearray(32), bytearray(32)
    other[0] = other[4] = 1  # folds to the same
    theirs = [pseudo_rand_gen(bytes(key), 1 << 32, [(8,)])[0] for key in (one, other)]
    assert theirs[0].tolist() == theirs[1].tolist()
    assert secagg.mask(bytes(one), 8).tolist() != secagg.mask(bytes(other), 8).tolist()


def test_two_clients_agree_upon_a_mask_and_neighbours_upon_being_neighbours() -> None:
    one, two = secagg.new_key(), secagg.new_key()
    here, there = secagg.pair_mask(one, secagg.public_of(two), 9), secagg.pair_mask(two, secagg.public_of(one), 9)
    assert here.tolist() == there.tolist()
    near = secagg.ring(range(300))
    assert all(len({*peers}) == 33 and client in peers for client, peers in near.items())
    assert all(client in near[peer] for client, peers in near.items() for peer in peers)
    assert all(2 * secagg.threshold(n) > n for n in range(3, 200))  # two halves cannot have one share each


# ---- the sum ----


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn+sam", "fedadam+swa(start=0.5, cycle=1)", "fedper"])
def test_rounds_are_those_of_a_simulation_but_for_the_units(tmp_path: Path, method: str) -> None:
    experiment = trial(method, participation="uniform(3)", dtype="float64")
    here, (there, _) = simulated(experiment), summed(tmp_path, experiment)
    assert torch.allclose(here.server_weights, there.server_weights, rtol=0, atol=1e-8)
    assert torch.allclose(here.weights, there.weights, rtol=0, atol=1e-8)
    for row, wanted in zip(there.metrics, here.metrics, strict=True):
        assert row["train_loss"] == pytest.approx(wanted["train_loss"], abs=1e-8)
        same_ones = ("clients", "steps", "floats_up", "floats_down", "left_out")
        assert [row[name] for name in same_ones] == [wanted[name] for name in same_ones]
    assert {row["update_norm"] for row in there.clients} == {None}  # nobody knows a client's own
    for client in range(len(SIZES)):
        wanted, kept = flatten(here.client_state(client)), flatten(kept_by(tmp_path, client))
        assert all(torch.allclose(kept[name], tensor, atol=1e-8) for name, tensor in wanted.items())


def test_statistics_of_batchnorm_are_summed_with_the_rest(tmp_path: Path) -> None:
    experiment = trial("fedavg", participation="all", dtype="float64")
    here, (there, _) = simulated(experiment, restless()), summed(tmp_path, experiment, own=restless())
    wanted, found = here.model.state_dict(), there.model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(tensor, found[name], rtol=0, atol=1e-7) for name, tensor in wanted.items())


def numbers(message: Message) -> list[Any]:
    """All arrays in a message."""
    records = message.content.array_records.values() if message.has_content() else ()
    return [array.numpy().reshape(-1) for record in records for array in record.values()]


def test_what_a_client_sends_tells_nothing_of_its_update(tmp_path: Path) -> None:
    """Twice the same updates: what is sent has nothing in common, and its bits are those of chance."""
    experiment = trial("scaffold", participation="all", rounds=4, evaluate_clients=None)
    sent = []
    for place in ("one", "two"):
        _, grid = summed(tmp_path / place, experiment)
        answers = [m for m in grid.messages if m.metadata.reply_to_message_id and m.has_content()]
        assert {len(numbers(m)) for m in answers} == {0, 1}  # the masked vector and nothing beside it
        assert not any("loss" in record for m in answers for record in m.content.config_records.values())
        sent.append(np.concatenate([array for m in answers for array in numbers(m)]).view(np.uint64))
    assert len(sent[0]) == len(sent[1]) == 4 * 4 * (15 + 15 + 2)
    assert not (sent[0] == sent[1]).any()
    bits = np.unpackbits(sent[0].view(np.uint8))
    assert abs(float(bits.mean()) - 0.5) < 5 * 0.5 / np.sqrt(len(bits))  # five standard deviations


# ---- clients that stay away ----


def silent(step: str, *clients: int) -> Tamper:
    """These clients do not answer in a step of round 2."""

    def tamper(message: Message, answer: Message) -> Message | None:
        told = instruction(message)
        return None if (told["round"], told["kind"]) == (2, step) and told["client"] in clients else answer

    return tamper


@pytest.mark.parametrize(("step", "heard"), [("keys", 3), ("shares", 3), ("train", 3), ("secrets", 4)])
def test_one_of_four_may_stay_away_at_any_step(tmp_path: Path, step: str, heard: int) -> None:
    experiment = trial("scaffold", participation="all", dtype="float64")
    there, _ = summed(tmp_path, experiment, silent(step, 1))
    assert [row["clients"] for row in there.metrics] == [4, heard, 4, 4]
    left = [0, 2, 3] if heard == 3 else [0, 1, 2, 3]
    here = simulated(experiment, participants=lambda t: left if t == 1 else [0, 1, 2, 3])
    assert torch.allclose(here.server_weights, there.server_weights, rtol=0, atol=1e-8)


@pytest.mark.parametrize("step", ["keys", "shares", "train", "secrets"])
def test_with_too_few_left_the_round_is_void(tmp_path: Path, step: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of four clients three must be left. They take all samples at once, so that draws do not matter."""
    experiment = trial("fedavg", participation="all", dtype="float64", batch_size=0)
    there, _ = summed(tmp_path, experiment, silent(step, 1, 2))
    assert [row.get("void", 0) for row in there.metrics] == [0, 1, 0, 0]
    assert "round 2 is void" in caplog.text
    here = simulated(experiment.replace(rounds=3))
    assert torch.allclose(here.server_weights, there.server_weights, rtol=0, atol=1e-8)


# ---- clients and servers that do not keep to it ----


def lie(kind: str, name: str, value: Any) -> Tamper:
    """Client 2 answers something else in a step of round 2."""

    def tamper(message: Message, answer: Message) -> Message:
        told = instruction(message)
        if (told["round"], told["kind"], told["client"]) == (2, kind, 2):
            if kind == "train":
                answer.content["update"] = type(answer.content["update"])({"masked": Array(value)})
            else:
                old = answer.content["secagg"][name]
                answer.content["secagg"][name] = [value] * len(old) if isinstance(old, list) else value
        return answer

    return tamper


@pytest.mark.parametrize(
    ("kind", "name", "value", "outcome"),
    [
        ("keys", "masks", b"no key", "left out"),
        ("keys", "shares", 7, "left out"),
        ("shares", "sealed", b"", "void"),  # nobody but itself has a share of its secrets
        ("shares", "seal", b"x", "void"),
        ("secrets", "pieces", b"x" * 60, "void"),
        ("train", "masked", np.zeros(3, np.int64), "left out"),
        ("train", "masked", np.zeros(17, np.float64), "left out"),
        ("train", "masked", np.arange(17, dtype=np.int64), "void"),
    ],
)
def test_a_client_that_lies_costs_a_round_at_most(
    tmp_path: Path, kind: str, name: str, value: Any, outcome: str
) -> None:
    there, _ = summed(tmp_path, trial("fedavg", participation="all"), lie(kind, name, value))
    row = there.metrics[1]
    assert ("void" if row.get("void") else "left out" if row["left_out"] else "fine") == outcome
    assert [row["clients"] for row in there.metrics if row["round"] != 2] == [4, 4, 4]


def test_a_client_with_masks_sends_nothing_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, grid = summed(tmp_path, trial(participation="all", rounds=1, evaluate_clients=None), secagg=False)
    assert there.metrics[0]["clients"] == 0 and "without which it sends nothing" in caplog.text
    assert not any(numbers(m) for m in grid.messages if m.metadata.reply_to_message_id)


def test_a_server_with_masks_takes_nothing_without_them(tmp_path: Path) -> None:
    there, _ = summed(tmp_path, trial("fedavg", participation="all", rounds=1), masks=False)
    assert there.metrics[0]["clients"] == 0


@pytest.mark.parametrize(
    ("heard", "lost"), [([0, 1, 2, 3], [1]), ([0, 1], [2, 3]), ([1, 2, 3], []), ([0, 1, 2, 9], []), ([0, 1, 2], [9])]
)
def test_a_client_gives_no_shares_that_show_a_single_update(heard: list[int], lost: list[int]) -> None:
    """Both shares of one client, shares for too few, or of somebody who is no neighbour."""
    asked = Instruction("r", 3, 0, "secrets", 0.1, 1.0, 3, 0)
    context = Context(1, 1, {}, RecordDict(), {})
    known = {"step": "masked", "run": "r", "round": 3, "client": 0}
    Memory(context).keep(**known, peers=[0, 1, 2, 3], sources=[0, 1, 2, 3], held=[b""] * 4)
    content = RecordDict({"secagg": ConfigRecord({"heard": heard, "lost": lost})})
    with pytest.raises(InputError, match="single update"):
        send_secrets(asked, content, context)


# ---- what is refused, and the project ----


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        *((name, {"method": name}) for name in ("median", "krum", "dp", "fednova", "nnm", "fltrust", "pfedhn", "ifca")),
        ("fedexp", {"method": "fedexp+sam"}),
        ("attack", {"method": "attack"}),
        ("recompute", {"batchnorm": "recompute"}),
        ("3 to 2048", {"participation": "uniform(2)"}),
        ("3 to 2048", {"clients": 2}),
    ],
)
def test_what_needs_more_than_sums_is_refused_by_name(part: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=part):
        server_app(Experiment(**{"clients": 9, "participation": "all"} | changes), secagg=True)


def test_a_project_with_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "init", str(tmp_path / "project"), "--data", "digits", "--model", "mlp", "--clients", "3"]
    words += ["--participation", "all", "--secagg"]
    assert main([*words, "--method", "krum"]) == 2 and "krum combines updates one by one" in capsys.readouterr().err
    assert not (tmp_path / "project").exists()
    assert main([*words, "--method", "scaffold"]) == 0
    assert (tmp_path / "project" / "federation.py").read_text().count("secagg=True") == 2


# ---- machines of their own ----

HELD = """
from pathlib import Path

import torch

from fedflat import Experiment, Federation

def blobs(count, seed):
    y = torch.arange(count) % 3
    return torch.nn.functional.one_hot(y, 4) + torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)), y

held = Federation([blobs(n, n) for n in (8, 12, 10)], test=blobs(30, 0))
"""
APPS = (
    HELD
    + '''
import sys

from flwr.clientapp import ClientApp

from fedflat.flower import client_app, server_app
from fedflat.flower.transport import Transport

class Leaving(ClientApp):
    """Fails in a round in which it has promised to send an update, on a node that is told so."""

    def __call__(self, message, context):
        told = message.content.config_records.get("instruction", {})
        if "leaves" in context.node_config and (told.get("kind"), told.get("round")) == ("train", 2):
            raise RuntimeError("gone")
        return honest(message, context)

def noting(real):
    """Note on this machine what the update was, for the test alone."""
    def masked_reply(update, asked, *rest):
        torch.save(update.delta, Path(f"true-{asked.round}-{asked.client}"))
        return real(update, asked, *rest)
    return masked_reply

def seen(real):
    """Note everything that reaches the server."""
    def pull(self, identity):
        answer = real(self, identity)
        for record in getattr(answer, "array_records", {}).values():
            for name, array in record.items():
                torch.save(torch.from_numpy(array.numpy().copy()), Path(f"seen-{identity}-{name}"))
        return answer
    return pull

sys.modules["fedflat.flower.client_app"].masked_reply = noting(sys.modules["fedflat.flower.client_app"].masked_reply)
Transport.pull = seen(Transport.pull)
experiment = Experiment.from_toml(Path(__file__).parent / "experiment.toml")
honest = client_app(experiment, data=held, secagg=True)
client = Leaving()
server = server_app(experiment, test=held, timeout=200, wait=200, secagg=True)
'''
)


def test_a_superlink_with_three_supernodes_sees_sums_only(tmp_path: Path) -> None:
    """One of three fails in round 2 after it has agreed upon masks: the sum of the others is right all the same."""
    experiment = Experiment(model="logistic", clients=3, participation="all", rounds=2, lr=0.1)
    experiment = experiment.replace(local_steps=2, batch_size=4)
    with fleet(tmp_path / "project", experiment, APPS) as there:
        there.superlink()
        there.register(0, 1, 2)
        for client in range(3):
            there.supernode(client, extra="leaves=true" if client == 1 else "")
        wait_until(lambda: all("SuperNode ID" in there.log(f"node{n}") for n in range(3)), "the nodes to be admitted")
        there.run()
        rows = there.folder / "run" / "metrics.jsonl"
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") == 2, "two rounds")
    run = fedflat.load_run(there.folder / "run")
    assert [row["clients"] for row in run.metrics] == [3, 2]
    scope: dict[str, Any] = {}
    exec(HELD, scope)  # the rest looks into the messages, which is for the fleet alone
    heard = [[0, 1, 2], [0, 2]]
    here = fedflat.run(experiment.replace(backend="serial"), federation=scope["held"], participants=lambda t: heard[t])
    assert torch.allclose(here.server_weights, run.server_weights, rtol=0, atol=1e-6)
    true = [torch.load(path) for path in there.folder.glob("true-*")]
    seen = [torch.load(path) for path in there.folder.glob("seen-*")]
    assert len(true) == len(seen) == 5 and all(vector.dtype == torch.int64 for vector in seen)
    weights = {8 / 30, 12 / 30, 10 / 30}
    for vector in seen:  # nothing that was sent is a client's update, whatever its weight
        got = vector[:15].double() * UNIT
        assert all(float((got - w * update).abs().median()) > 1.0 for update in true for w in weights)
