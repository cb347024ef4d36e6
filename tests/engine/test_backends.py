"""One result on every back end, and errors that say where they come from."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_run, blobs, draws, network, plain, restless, same, world
from torch import Tensor, nn

import fedflat
from fedflat import Federation, Part
from fedflat.core import streams
from fedflat.core.shared_memory import SharedTensors
from fedflat.core.tensors import flatten, nest
from fedflat.errors import ClientError, InputError, RunError, UnknownNameError

before: set[Any] = set()


@pytest.fixture(autouse=True)
def count_children() -> None:
    before.clear()
    before.update(multiprocessing.active_children())


def newborn() -> set[Any]:
    """Processes that this test has started and that still run."""
    return set(multiprocessing.active_children()) - before


WAYS = [{"backend": "serial"}, {"workers": 1}, {"workers": 2}, {"workers": 3}]


def small_cnn() -> nn.Module:
    with streams.isolated(0, "tests"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 3),
        )


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 256, (count, 3, 8, 8), generator=draws(seed), dtype=torch.uint8)
    return x, torch.arange(count) % 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_bits_from_every_back_end_on_a_network_that_draws_and_remembers(dtype: str) -> None:
    exp = plain(backend="pool", rounds=3, method="diary", dtype=dtype, participation="uniform(5)", momentum=0.9)
    runs = [
        fedflat.run(exp.replace(**way), federation=world((6, 10, 14, 8, 12, 18, 4)), model=restless()) for way in WAYS
    ]
    for other in runs[1:]:
        assert_same_run(runs[0], other, 7)


def test_the_same_bits_from_every_back_end_on_pictures() -> None:
    federation = Federation([pictures(8 + 2 * i, i) for i in range(5)], test=pictures(1300, 99))
    exp = plain(backend="pool", rounds=2, dtype="float32", evaluated="all")
    runs = [fedflat.run(exp.replace(**way), federation=federation, model=small_cnn()) for way in WAYS]
    for other in runs[1:]:
        assert_same_run(runs[0], other, 5)


def test_the_number_of_threads_is_left_as_found_and_does_not_matter() -> None:
    threads_before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(fedflat.run(plain(dtype="float32", model="mlp"), federation=world()))
            assert torch.get_num_threads() == threads
        assert_same_run(*runs, 3)
    finally:
        torch.set_num_threads(threads_before)


def test_an_unknown_back_end_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'serial'"):
        fedflat.run(plain(backend="sreial"), federation=world(), model=network())


def test_ray_that_is_not_installed_is_answered_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'fedflat\[ray\]'"):
        fedflat.run(plain(backend="ray"), federation=world(), model=network())


def test_the_address_of_a_cluster_is_refused_where_none_is_used() -> None:
    with pytest.raises(InputError, match="a Ray address needs backend='ray', but this is backend='serial'"):
        fedflat.run(plain(), federation=world(), model=network(), ray_address="auto")


# ---- what goes wrong in a client ----


class Trap(nn.Module):
    """Does something to the client whose samples begin with 777, at its fourth step."""

    def __init__(self, deed: str) -> None:
        super().__init__()
        self.net, self.deed, self.calls = network(), deed, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (x[:, 0] == 777).all():
            self.calls += 1
            if self.calls == 4:
                getattr(self, self.deed)()
        return self.net(x)

    def fail(self) -> None:
        raise LookupError("the cat ate it")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def marked(client: int) -> Federation:
    pairs = [blobs(10, seed=i) for i in range(4)]
    pairs[client][0][:, 0] = 777
    return Federation(pairs, test=blobs(5))


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_an_error_in_a_client_says_round_client_step_and_where_in_the_users_code(backend: str) -> None:
    exp = plain(rounds=3, batch_size=2, backend=backend, workers=2)
    turns = [[0, 1], [3, 2, 0, 1], [0]]
    with pytest.raises(ClientError, match="round 2, client 2, step 3: LookupError: the cat ate it") as caught:
        fedflat.run(exp, federation=marked(2), model=Trap("fail"), participants=turns.__getitem__)
    error = caught.value
    assert (error.round, error.client, error.step) == (2, 2, 3)
    assert "in fail" in error.traceback and "test_backends.py" in error.traceback
    assert error.traceback in str(error)
    assert newborn() == set()


class Lazy(Sequence[Any]):
    """Clients that are read when asked for; one of them cannot be read any more after a while."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, client: int) -> Any:
        if client == 1:
            self.asked += 1
            if self.asked > 12:
                raise OSError("the disk is gone")
        return blobs(6, seed=client)


@pytest.mark.parametrize("backend", ["serial", "pool"])
def test_data_that_cannot_be_read_any_more_name_round_and_client(backend: str) -> None:
    exp = plain(rounds=30, backend=backend, workers=1)
    with pytest.raises(ClientError, match=r"round \d+, client 1.*the disk is gone"):
        fedflat.run(exp, federation=Federation(Lazy(), sizes=[6, 6, 6]), model=network())


def test_a_client_of_which_three_workers_die_is_reported_by_name() -> None:
    exp = plain(rounds=2, batch_size=2, backend="pool", workers=2)
    with pytest.raises(RunError, match=r"3 workers died while they had client 2 in round 1 \(exit code -9\)"):
        fedflat.run(exp, federation=marked(2), model=Trap("die"))
    assert newborn() == set()


class Culprit(fedflat.Callback):
    """Kills a worker between two rounds."""

    def round(self, run: Any, metrics: Any) -> None:
        if metrics["round"] == 2:
            victim = newborn().pop()
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_is_replaced_and_the_run_has_the_same_bits(workers: int) -> None:
    exp = plain(rounds=4, backend="pool", workers=workers, method="scaffold")
    given: dict[str, Any] = {"federation": world(), "model": network()}
    disturbed = fedflat.run(exp, callbacks=[Culprit()], **given)
    assert newborn() == set()
    assert_same_run(disturbed, fedflat.run(exp, **given), len(world()))


class Clumsy(fedflat.Callback):
    def __init__(self, when: str) -> None:
        self.when = when

    def start(self, run: Any) -> None:
        if self.when == "start":
            raise KeyError("start")

    def round(self, run: Any, metrics: Any) -> None:
        if self.when == "round":
            raise KeyError("round")


@pytest.mark.parametrize("when", ["start", "round"])
def test_no_worker_outlives_an_error_in_a_callback(when: str) -> None:
    with pytest.raises(KeyError, match=when):
        fedflat.run(plain(backend="pool", workers=2), federation=world(), model=network(), callbacks=[Clumsy(when)])
    assert newborn() == set()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_outlives_a_run() -> None:
    exp = plain(backend="pool", workers=2)
    fedflat.run(exp, federation=world(), model=network())
    open_before = descriptors()
    for _ in range(3):
        fedflat.run(exp, federation=world(), model=network())
    assert descriptors() <= open_before


def test_a_refusal_inside_a_client_stays_a_refusal() -> None:
    @dataclass(frozen=True)
    class Picky(Part):
        def begin(self, local: Any) -> None:
            raise InputError(f"client {local.client} is not to my taste")

    fedflat.register(Picky)
    for backend in ("serial", "pool"):
        with pytest.raises(InputError, match="client 0 is not to my taste"):
            exp = plain(backend=backend, workers=2, method="picky")
            fedflat.run(exp, federation=world(), model=network(), participants=lambda t: [0])


# ---- shared memory ----


def test_shared_memory_gives_back_what_was_put_in_and_grows() -> None:
    box = SharedTensors()
    for size in (0, 1, 100, 5, 100_000):
        tensors = {
            "a": torch.randn(size, generator=draws(size)),
            "b": torch.arange(size).view(1, -1),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "bool": torch.ones(size, dtype=torch.bool),
            "half": torch.ones(3, size).bfloat16(),
            "strided": torch.arange(12.0).view(3, 4).T,
            "none": torch.empty(0, 7),
        }
        assert same(box.read(box.write(tensors)), tensors)
    box.close()


def test_the_other_process_sees_what_was_written_after_the_fork_and_answers() -> None:
    question, answer = SharedTensors(), SharedTensors()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def double() -> None:
        torch.set_num_threads(1)
        letter = theirs.recv()
        theirs.send(answer.write({"twice": 2 * question.read(letter)["x"]}))

    process = context.Process(target=double, daemon=True)
    process.start()
    x = torch.randn(50_000, generator=draws())
    ours.send(question.write({"x": x}))
    assert ours.poll(60)
    assert torch.equal(answer.read(ours.recv())["twice"], 2 * x)
    process.join()


def test_nested_states_survive_flattening() -> None:
    nested = {"sent": {"scaffold": {"c": torch.ones(2), "a/b": torch.zeros(1)}, "empty": {}}, "states": {}}
    assert nest(flatten(nested), 3) == {"sent": {"scaffold": nested["sent"]["scaffold"]}}
