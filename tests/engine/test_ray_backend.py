"""Clients on a Ray cluster: the same bits, whoever dies, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_run, blobs, network, plain, restless, run_python, same, world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedflat
from fedflat import Federation
from fedflat.core import streams
from fedflat.errors import ClientError, InputError, RunError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedflat[ray]'")

from fedflat.core.flat import FlatModel  # noqa: E402
from fedflat.engine.backends.ray.backend import cut, resources  # noqa: E402
from fedflat.engine.backends.ray.serialization import pack, unpack  # noqa: E402
from fedflat.engine.setup import Job  # noqa: E402

from .cluster import running  # noqa: E402

SIZES = (6, 10, 14, 8, 12, 18, 4)


# ---- GPUs, which Ray believes in when it is told their number ----


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus", "count", "asked"),
    [
        (None, 8, None, 8, {"num_cpus": 1}),
        (3, 8, None, 3, {"num_cpus": 1}),
        (None, 8, 2.0, 2, {"num_cpus": 1, "num_gpus": 1}),
        (2, 8, 2.0, 2, {"num_cpus": 1, "num_gpus": 1}),
        (3, 8, 2.0, 3, {"num_cpus": 1, "num_gpus": 0.5}),
        (8, 2, 2.0, 8, {"num_cpus": 0.25, "num_gpus": 0.25}),
    ],
)
def test_workers_ask_for_such_a_share_of_a_gpu_that_all_fit(
    workers: int | None, cpus: int, gpus: float | None, count: int, asked: dict[str, float]
) -> None:
    assert resources(workers, cpus, gpus) == (count, asked)


def test_a_cluster_without_gpus_is_refused_for_clients_on_gpus() -> None:
    with pytest.raises(InputError, match="the Ray cluster has no GPU"):
        resources(2, 4, 0.0)


def test_five_workers_fit_on_two_gpus_and_two_cpus_and_each_sees_one_gpu() -> None:
    class Sight:  # inside, so that Ray sends it to workers that cannot import the tests
        def gpus(self) -> list[str]:
            return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    count, asked = resources(5, 2, 2.0)
    with running(nodes=1, cpus=2, gpus=2) as cluster:
        ray.init(cluster.address, log_to_driver=False)
        try:
            actors = [ray.remote(Sight).options(**asked).remote() for _ in range(count)]
            seen = ray.get([actor.gpus.remote() for actor in actors], timeout=120)
        finally:
            ray.shutdown()
    assert sorted(map(len, seen)) == [1] * 5
    assert sorted(Counter(gpu for (gpu,) in seen).values()) == [2, 3]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes that somebody else has started, and that must outlive every run."""
    with running(nodes=2) as cluster:
        yield cluster.address
        assert not ray.is_initialized()
        with socket.create_connection(cluster.address.rsplit(":", 1), timeout=5):
            pass


def with_tests(sizes: tuple[int, ...] = SIZES) -> Federation:
    """Every client with test data of its own."""
    tests = [blobs(9, seed=100 + i) for i in range(len(sizes))]
    return Federation([blobs(n, seed=i) for i, n in enumerate(sizes)], test=blobs(30, seed=1000), client_tests=tests)


def poisoned() -> Federation:
    """Two clients whose loss is no number."""
    pairs = [blobs(n, seed=i) for i, n in enumerate(SIZES)]
    for client in (2, 4):
        pairs[client][0][0, 0] = float("nan")
    return Federation(pairs, test=blobs(9))


WORLDS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({"method": "fedavg", "model": "mlp"}, world(SIZES)),
    "state, statistics and draws": ({"method": "diary", "evaluated": "all"}, world(SIZES)),
    "composed": ({"method": "scaffold+asam+swa", "batchnorm": "recompute"}, with_tests()),
    "personal": ({"method": "fedrep", "batchnorm": "local"}, with_tests()),
    "generated": ({"method": "pfedhn"}, with_tests()),
    "an owner of the combination": ({"method": "fednova+scaffold"}, world(SIZES)),
    "several models": ({"method": "ifca"}, with_tests()),
    "a start ahead of the server": ({"method": "fedacg+asam"}, world(SIZES)),
    "updates weighted by losses": ({"method": "qfedavg"}, world(SIZES)),
    "duals on both sides": ({"method": "fedsmoo"}, world(SIZES)),
    "a number that follows the clients": ({"method": "fedwmsam", "momentum": 0.0}, world(SIZES)),
    "clients that are left out": ({"method": "diary"}, poisoned()),
    "stacked": ({"method": "scaffold", "model": "mlp", "stack": 2}, with_tests()),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_same_bits_as_in_one_process(name: str, address: str) -> None:
    fields, federation = WORLDS[name]
    common = {"rounds": 3, "dtype": "float32", "participation": "uniform(6)", "momentum": 0.9, "clients": len(SIZES)}
    exp = plain(**common | fields)
    given: dict[str, Any] = {"federation": federation, "model": None if "model" in fields else restless()}
    here = fedflat.run(exp, **given)
    there = fedflat.run(exp.replace(backend="ray"), ray_address=address, **given)
    assert_same_run(here, there, len(SIZES))
    assert here.evaluations == there.evaluations


# ---- checkpoints ----


class StopAfter(fedflat.Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round(self, run: Any, metrics: Any) -> bool:
        return bool(metrics["round"] == self.rounds)


LASTING = plain(rounds=4, method="diary", participation="uniform(5)", dtype="float32", momentum=0.9)


def go(rounds: int = 4, **options: Any) -> fedflat.Run:
    """The experiment of these tests, up to a round."""
    fields = {name: options.pop(name) for name in ("backend", "workers") if name in options}
    given: dict[str, Any] = {"federation": world(SIZES), "model": restless(), "callbacks": [StopAfter(rounds)]}
    return fedflat.run(LASTING.replace(**fields), **given, **options)


def finish_alone(out: str) -> None:
    """Go on in a process of its own, which starts a cluster and must leave nothing of it."""
    before, os.environ["FAMILY"] = signal.getsignal(signal.SIGTERM), out
    go(out=out, backend="ray", workers=2, ray_address="local")
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
    wait_until(lambda: heirs(f"FAMILY={out}") == [])


def heirs(setting: str) -> list[str]:
    """Processes that have inherited this from their environment (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and setting.encode() in (entry / "environ").read_bytes():
                found.append((entry / "comm").read_text())
    return found


def test_a_run_that_was_stopped_goes_on_anywhere(tmp_path: Path, address: str) -> None:
    """Its folder is complete although the states lay in the cluster; another cluster, or none, goes on with it."""
    out = tmp_path / "run"
    go(2, out=out, backend="ray", ray_address=address)
    assert_same_run(fedflat.load_run(out, model=restless()), go(2), len(SIZES))
    go(3, out=out)
    script = "import sys; from engine import test_ray_backend; test_ray_backend.finish_alone(sys.argv[1])"
    run_python(script, out)
    assert_same_run(fedflat.load_run(out, model=restless()), go(), len(SIZES))


# ---- what dies ----


def wide() -> nn.Module:
    """A network of such a size that states and sums lie in the nodes' memory: Ray hands small values to the caller."""
    with streams.isolated(0, "tests"):
        return nn.Sequential(nn.Linear(4, 5000), nn.BatchNorm1d(5000), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5000, 3))


class Trace(nn.Module):
    """Leaves a file for every pass on a node, and takes its time; may end its process."""

    def __init__(self, folder: Path, deaths: int = 0) -> None:
        super().__init__()
        self.net, self.folder, self.deaths = wide(), str(folder), deaths

    def forward(self, x: Tensor) -> Tensor:
        if self.training and ray.is_initialized():
            time.sleep(0.02)
            node = Path(self.folder) / ray.get_runtime_context().get_node_id()
            with node.open("a") as file:
                file.write(".")
            if (x[:, 0] == 777).any():
                self.die()
        return self.net(x)

    def die(self) -> None:
        for death in range(self.deaths):
            grave = Path(self.folder) / f"grave{death}"
            if not grave.exists():
                grave.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def wait_until(condition: Any, seconds: float = 50) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


class KillNode(fedflat.Callback):
    """Kills a node once it is at work on the third round, by when states of many clients lie there."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.node = cluster, next(iter(cluster.worker_nodes))
        self.trace = folder / self.node.node_id
        self.thread = threading.Thread(target=self.kill)
        self.due = 0

    def passes(self) -> int:
        return self.trace.stat().st_size if self.trace.exists() else 0

    def round(self, run: Any, metrics: Any) -> None:
        if metrics["round"] == 2:
            assert self.passes() > 0, "the second node has done nothing"
            self.due = self.passes() + 6
            self.thread.start()

    def kill(self) -> None:
        wait_until(lambda: self.passes() >= self.due)
        self.cluster.remove_node(self.node, allow_graceful=False)

    def end(self, run: Any) -> None:
        self.thread.join()


@pytest.mark.parametrize("saved", [False, True])
def test_a_node_killed_in_the_middle_of_a_round_changes_no_bit(tmp_path: Path, saved: bool) -> None:
    """saved: whether the states that are lost are in a checkpoint already, or must be made again from the first."""
    exp = plain(rounds=4, method="diary", dtype="float32", momentum=0.9)
    alone = fedflat.run(exp, federation=world(SIZES), model=Trace(tmp_path))
    engine: Any = sys.modules["fedflat.runs.runner"]
    usual = engine.CHECKPOINT_SECONDS
    engine.CHECKPOINT_SECONDS = 0.0 if saved else 1000.0
    try:
        with running(nodes=2) as cluster:
            killer = KillNode(cluster, tmp_path)
            far = exp.replace(backend="ray")
            given: dict[str, Any] = {"federation": world(SIZES), "model": Trace(tmp_path), "callbacks": [killer]}
            run = fedflat.run(far, ray_address=cluster.address, out=tmp_path / "run" if saved else None, **given)
            assert not killer.thread.is_alive()
            assert killer.node not in cluster.worker_nodes
    finally:
        engine.CHECKPOINT_SECONDS = usual
    assert_same_run(run, alone, len(SIZES))


def marked(client: int) -> Federation:
    pairs = [blobs(10, seed=i) for i in range(4)]
    pairs[client][0][:, 0] = 777
    return Federation(pairs, test=blobs(5))


def test_a_client_that_ends_its_worker_is_run_again_and_given_up_the_third_time(tmp_path: Path, address: str) -> None:
    exp = plain(rounds=2, method="diary", dtype="float32")
    alone = fedflat.run(exp, federation=marked(2), model=Trace(tmp_path))
    for deaths in (1, 9):
        folder = tmp_path / str(deaths)
        folder.mkdir()
        given: dict[str, Any] = {"federation": marked(2), "model": Trace(folder, deaths), "ray_address": address}
        if deaths == 1:
            assert_same_run(fedflat.run(exp.replace(backend="ray"), **given), alone, 4)
        else:
            with pytest.raises(RunError, match=r"3 workers died while they had clients? .*2"):
                fedflat.run(exp.replace(backend="ray"), **given)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (x[:, 0] == 777).all():
            raise LookupError("the cat ate it")
        return self.net(x)


def test_an_error_in_a_client_says_where_it_comes_from(address: str) -> None:
    exp = plain(backend="ray", batch_size=2)
    with pytest.raises(ClientError, match="round 1, client 2, step 0: LookupError: the cat ate it") as caught:
        fedflat.run(exp, federation=marked(2), model=Broken(), ray_address=address)
    assert "in forward" in caught.value.traceback
    assert not ray.is_initialized()


# ---- joining and leaving ----


def test_a_process_that_is_in_a_cluster_stays_in_it(address: str) -> None:
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        fedflat.run(plain(backend="ray", workers=1), federation=world(), model=network())
        assert ray.is_initialized()
        wait_until(lambda: ray.available_resources().get("CPU") == 2)
    finally:
        ray.shutdown()


def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        exp = plain(backend="ray")
        with pytest.raises(InputError, match=f"no Ray cluster answers at {nowhere}"):
            fedflat.run(exp, federation=world(), model=network(), ray_address=nowhere)
        monkeypatch.setenv("RAY_ADDRESS", nowhere)
        with pytest.raises(InputError, match=f"no Ray cluster answers at {nowhere}"):
            fedflat.run(exp, federation=world(), model=network())
    with pytest.raises(InputError, match="host:port"):
        fedflat.run(exp, federation=world(), model=network(), ray_address="ray://somewhere:10001")
    assert not ray.is_initialized()


def test_a_cluster_without_cpus_or_with_none_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedflat.engine.backends.ray.backend.PATIENCE", 1.0)
    with running(nodes=1, cpus=0) as cluster:
        exp, given = plain(backend="ray", workers=1), {"federation": world(), "model": network()}
        with pytest.raises(InputError, match="has no CPUs for workers"):
            fedflat.run(exp, ray_address=cluster.address, **given)
        cluster.add_node(num_cpus=1, temp_dir=cluster.head_node.get_temp_dir_path(), include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        assert ray.util.placement_group([{"CPU": 1}]).wait(30)
        with pytest.raises(RunError, match=r"no worker has started within 1 s: are all cores taken"):
            fedflat.run(exp, **given)
        ray.shutdown()


def test_what_cannot_be_sent_is_named(address: str) -> None:
    federation, lock = world(), threading.Lock()
    federation.preprocess = lambda x, generator, dtype=None: (x, lock)[0]  # type: ignore[assignment]
    with pytest.raises(InputError, match="the data cannot be sent to another process"):
        fedflat.run(plain(backend="ray"), federation=federation, model=network(), ray_address=address)
    assert not ray.is_initialized()


# ---- blocks of jobs, and serialization ----


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_blocks_are_aligned_powers_of_two_and_none_is_more_than_a_fair_share(sizes: list[int], workers: int) -> None:
    jobs = [Job(client) for client in range(len(sizes))]
    blocks = list(cut(iter(jobs), workers, lambda job: sizes[job.client]))
    assert [job for block in blocks for job in block] == jobs
    place = 0
    for block in blocks:
        assert len(block) & (len(block) - 1) == 0 and place % len(block) == 0
        fair = sum(sizes[place:]) / workers
        assert len(block) == 1 or sum(sizes[job.client] for job in block) <= fair
        place += len(block)


def test_tensors_that_share_memory_share_it_again_and_need_no_copy() -> None:
    x = torch.arange(24.0).view(4, 6)
    views = {"row": x[1], "turned": x.T, "whole": x, "none": x[:0], "half": x.bfloat16()}
    head, memory = pack({**views, "code": lambda: float(x.sum())})
    assert sorted(part.nbytes for part in memory) == [2 * 24, 4 * 24]
    there = unpack((head, memory))
    assert same({name: there[name] for name in views}, views)
    assert there["code"]() == x.sum()
    memory[0].flags.writeable = True
    assert there["row"].data_ptr() - there["whole"].data_ptr() == 4 * 6
    assert unpack((head, memory), own=True)["whole"].data_ptr() != there["whole"].data_ptr()


def test_a_model_that_has_travelled_is_still_one_vector() -> None:
    model = FlatModel(restless())
    model.capture_features("the test")
    there: FlatModel = unpack(pack(model), own=True)
    x, y = blobs(8)
    for one in (model, there):
        torch.manual_seed(0)
        nn.functional.cross_entropy(one(x), y).backward()
        one.theta.sub_(one.grad)
    assert torch.equal(model.theta, there.theta) and model.grad.norm() > 0
    assert torch.equal(model.buffers, there.buffers)
    assert torch.equal(nn.utils.parameters_to_vector(there.module.parameters()), there.theta)
    assert same({"features": there.take_features()}, {"features": model.take_features()})
