"""Client state and checkpoints on disk: formats, budgets, damage."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import network, plain, same, world
from safetensors.torch import load_file

import fedflat
from fedflat.core.tensors import flatten, nest
from fedflat.engine.backends.base import RemoteStates
from fedflat.errors import CheckpointError
from fedflat.runs.checkpoint import Checkpoint
from fedflat.runs.files import MANY
from fedflat.runs.folder import RunFolder
from fedflat.runs.store import OVERHEAD, SECURED, ClientStore


def state(client: int, version: int = 0, size: int = 10) -> dict[str, dict[str, torch.Tensor]]:
    return {"diary": {"c": torch.full((size,), client + version / 100), "n": torch.tensor(version)}}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("memory", [0, 1, 100, 1 << 20])
def test_states_beyond_the_budget_come_back_from_disk(tmp_path: Path, memory: int) -> None:
    store = ClientStore(tmp_path, memory=memory)
    for version in (1, 2, 3):
        for client in range(version, 2000, 97):
            store.put(client, state(client, version))
        store.commit_round(version)
    latest = {client: version for version in (1, 2, 3) for client in range(version, 2000, 97)}
    assert store.versions == latest
    assert all(same(store.get(client), state(client, version)) for client, version in latest.items())
    assert store.get(0) == {}
    assert bool(files(tmp_path)) == (memory < 1 << 20)


def test_a_state_counts_once_its_round_is_committed() -> None:
    store = ClientStore()
    store.put(1, state(1, 1))
    assert store.get(1) == {}
    store.forget_pending()
    store.commit_round(1)
    assert store.get(1) == {}
    store.put(1, state(1, 2))
    store.commit_round(2)
    assert same(store.get(1), state(1, 2))


def test_the_store_keeps_copies(tmp_path: Path) -> None:
    store, mine = ClientStore(tmp_path), state(1)
    store.put(1, mine)
    mine["diary"]["c"].zero_()
    store.commit_round(1)
    assert same(store.get(1), state(1))


def test_a_state_can_be_emptied(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(1, state(1))
    store.commit_round(1)
    store.put(1, {"diary": {}})
    store.commit_round(2)
    assert store.get(1) == {}


def test_checkpoints_go_on_after_a_state_was_emptied(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for version, kept in enumerate((state(1), {}, {}, state(1)), start=1):
        store.put(1, kept)
        store.commit_round(version)
        assert store.flush() == ({1: version} if kept else {})
        store.settle()
    assert files(tmp_path) == {"0/1.4.safetensors"}  # the checkpoint before had none


def test_an_interrupted_process_finds_the_versions_of_its_checkpoint(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, memory=0)
    for version in (1, 2):
        for client in (0, 1, 2):
            store.put(client, state(client, version))
        store.commit_round(version)
        if version == 1:
            versions = store.flush()
            store.settle()
    store.flush()  # and here the process is killed, before its second checkpoint
    again = ClientStore(tmp_path)
    again.restore(versions)
    assert all(same(again.get(client), state(client, 1)) for client in (0, 1, 2))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_disk_does_not_fill_with_old_versions(tmp_path: Path, checkpoints: bool) -> None:
    store = ClientStore(tmp_path, memory=0)
    for version in range(1, 21):
        for client in range(4):
            store.put(client, state(client, version))
        store.commit_round(version)
        if checkpoints and version % 5 == 0:
            store.flush()
            store.settle()
    assert len(files(tmp_path)) <= 12  # two checkpoints, and what is newer
    assert all(same(store.get(client), state(client, 20)) for client in range(4))


def test_a_run_without_a_folder_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = fedflat.run(plain(method="diary", rounds=2), federation=world(), model=network(), state_memory=0)
    assert run.client_state(0)["diary"]["rounds_seen"] == 2
    del run
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_small_budget_changes_no_bit(tmp_path: Path) -> None:
    exp = plain(method="diary", rounds=4, participation="uniform(2)")
    roomy = fedflat.run(exp, federation=world(), model=network())
    for out in (None, tmp_path / "run"):
        tight = fedflat.run(exp, federation=world(), model=network(), state_memory=0, out=out)
        assert same(tight.server_weights, roomy.server_weights)
        assert all(same(tight.client_state(i), roomy.client_state(i)) for i in range(3))


@pytest.mark.parametrize("clients", [MANY, MANY + 1])
def test_a_checkpoint_of_few_or_many_states_is_complete(tmp_path: Path, clients: int) -> None:
    store = ClientStore(tmp_path, memory=10 * (OVERHEAD + 48))  # some go to the disk before the checkpoint
    for client in range(clients):
        store.put(client, state(client))
    store.commit_round(1)
    assert 0 < len(files(tmp_path)) < clients
    again = ClientStore(tmp_path)
    again.restore(store.flush())
    assert all(same(again.get(client), state(client)) for client in range(clients))


class Elsewhere(RemoteStates):
    """States on a machine that is gone once they are known to be on the disk."""

    def __init__(self, states: Any, size: int = 0) -> None:
        self.read, self.fetched, self.size = lambda: states, 0, size

    def fetch(self) -> Any:
        self.fetched += 1
        return self.read()

    def secure(self, read: Any) -> None:
        self.read = read


@pytest.mark.parametrize("asked", ["flush", "secure"])
def test_states_elsewhere_are_fetched_when_they_must_be_on_the_disk_and_not_before(tmp_path: Path, asked: str) -> None:
    store, far = ClientStore(tmp_path), Elsewhere(state(3, 1))
    store.put(3, far)
    store.commit_round(1)
    assert store.get(3) is far and far.fetched == 0
    getattr(store, asked)()
    assert far.fetched == 1 and files(tmp_path) == {"0/3.1.safetensors"}
    assert same(far, state(3, 1))
    again = ClientStore(tmp_path)
    again.restore(dict(store.versions))
    assert same(again.get(3), state(3, 1))


def test_states_elsewhere_beyond_the_budget_are_let_go_there(tmp_path: Path) -> None:
    store, alive = ClientStore(tmp_path, memory=3 * (OVERHEAD + 100)), weakref.WeakValueDictionary[int, Elsewhere]()
    for round in range(1, 6):
        store.put(round, far := Elsewhere(state(round), size=100))
        alive[round] = far
        store.commit_round(round)
    assert list(alive) == [3, 4, 5] and files(tmp_path) == {"0/1.1.safetensors", "0/2.2.safetensors"}
    assert all(same(dict(store.get(client)), state(client)) for client in range(1, 6))


def test_no_state_stays_elsewhere_alone_for_many_rounds(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(1, Elsewhere(state(1)))
    for round in range(1, SECURED + 1):
        assert files(tmp_path) == set()
        store.commit_round(round)
    assert files(tmp_path) == {"0/1.1.safetensors"}


def test_a_damaged_client_state_is_named(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, memory=0)
    for client in (0, 1):
        store.put(client, state(client, 1))
    store.commit_round(1)
    store.flush()
    (path,) = tmp_path.rglob("0.1.safetensors")
    whole = path.read_bytes()
    damages = [b"", whole[:-3], whole[:20], b"x" * len(whole), whole[:-1] + bytes([whole[-1] ^ 1])]
    for damage in damages:
        path.write_bytes(damage)
        fresh = ClientStore(tmp_path)
        fresh.restore({0: 1, 1: 1})
        with pytest.raises(CheckpointError, match=r"0\.1\.safetensors is damaged"):
            fresh.get(0)
        assert path.read_bytes() == damage
        assert same(fresh.get(1), state(1, 1))


def test_a_missing_client_state_is_named(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.restore({7: 3})
    with pytest.raises(CheckpointError, match=r"7\.3\.safetensors is missing"):
        store.get(7)


def test_names_with_slashes_survive() -> None:
    states = {"a": {"x/y": torch.ones(1)}, "b": {"z": torch.zeros(2)}}
    assert same(nest(flatten(states)), states)


# ---- checkpoints ----


def checkpoint(round: int) -> Checkpoint:
    return Checkpoint({"w": torch.full((5,), float(round))}, {"round": round}, {3: 1, 12: round})


def test_a_checkpoint_is_json_and_safetensors_with_a_checksum(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.load_checkpoint() is None
    for round in (0, 1, 2):
        folder.save_checkpoint(checkpoint(round))
    plain_values = json.loads((tmp_path / "checkpoint.json").read_text())
    tensors = tmp_path / "checkpoint-000002.safetensors"
    assert hashlib.sha256(tensors.read_bytes()).hexdigest() == plain_values["tensors_sha256"]
    assert torch.equal(load_file(tensors)["w"], torch.full((5,), 2.0))
    older = {"checkpoint-previous.json", "checkpoint-000001.safetensors"}
    assert files(tmp_path) == {"checkpoint.json", tensors.name, *older}
    read = folder.load_checkpoint()
    assert read is not None
    assert same(read.tensors, checkpoint(2).tensors)
    assert (read.plain, read.versions) == ({"round": 2}, {3: 1, 12: 2})


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(checkpoint(1))
    for path in (tmp_path / "checkpoint.json", tmp_path / "checkpoint-000001.safetensors"):  # every byte of the index
        whole = path.read_bytes()
        cuts = [whole[:n] for n in range(0, len(whole) - 2, 7)]
        for damage in [*cuts, b"x" * len(whole), whole.replace(b"}", b"]"), b"[]", b"{}", b"\xff\xff"]:
            path.write_bytes(damage)
            with pytest.raises(CheckpointError, match=path.name):
                folder.load_checkpoint()
            assert path.read_bytes() == damage
        path.write_bytes(whole)
    assert folder.load_checkpoint() is not None


def test_a_flipped_bit_in_the_tensors_is_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(checkpoint(1))
    path = tmp_path / "checkpoint-000001.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=path.name):
        folder.load_checkpoint()


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(checkpoint(1))
    (tmp_path / "checkpoint-000001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-000001\.safetensors is missing"):
        folder.load_checkpoint()


def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.lock()
    with pytest.raises(CheckpointError, match="in use by another process"):
        second.lock()
    second.unlock()
    first.unlock()
    second.lock()
    second.unlock()


def test_rows_are_read_up_to_a_round(tmp_path: Path) -> None:
    folder, rows = RunFolder(tmp_path), [{"round": r, "x": r / 3} for r in (1, 2, 3)]
    for row in rows:
        folder.append("metrics", [row])
    assert folder.rows("metrics", 3) == rows
    assert folder.rows("metrics", 2) == rows[:2]
    assert folder.rows("clients", 3) == []


def test_a_last_line_cut_short_is_dropped_and_a_damaged_line_before_it_is_named(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert folder.rows("metrics", 2) == [{"round": 1}, {"round": 2}]
    path.write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    for read in (lambda: folder.rows("metrics", 3), lambda: folder.rows("metrics", 2)):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2"):
            read()
    assert path.read_text() == '{"round": 1}\n{"rou\n{"round": 3}\n'


def test_a_million_virtual_clients() -> None:
    federation: Any = fedflat.load_federation("digits", partition="resample(size=20)", clients=1_000_000)
    exp = plain(model="logistic", rounds=2, participation="uniform(10)", method="diary", dtype="float32")
    exp = exp.replace(backend="pool", workers=2)
    run = fedflat.run(exp, federation=federation)
    heard = {row["client"] for row in run.clients}
    assert len(run.clients) == 20
    assert max(heard) > 10_000
    assert all(run.client_state(i)["diary"]["rounds_seen"] == 1 for i in heard)
    assert run.client_state(next(i for i in range(100) if i not in heard)) == {}
