"""Bad configurations and data files end in one clear line, whatever they hold."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import write_cifar10_binary, write_cifar10_python
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fedflat
from fedflat.core.method import Method
from fedflat.data import readers
from fedflat.errors import DataError, InputError
from fedflat.specs import combinations, parse_sum
from fuzz.mutants import mutate
from fuzz.run_folders import command

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
bounded = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 60, suppress_health_check=list(HealthCheck)
)
words = st.text(max_size=40) | st.sampled_from(
    [
        "9" * 400,
        "9" * 5000,
        "(" * 300,
        "a(" * 3000,
        "dp(delta=1e-320)",
        "fedavg+" * 3000 + "fedavg",
        "sam(rho=1e999)",
        "~x",
    ]
)
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1e-320, float("nan")])
anything = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner),
)


def refused(action: Callable[[], Any]) -> str:
    """The line that refuses a bad input; empty if it was accepted. Any other error is the test's."""
    try:
        action()
    except InputError as error:
        assert len(str(error)) < 2000
        return str(error)
    return ""


@bounded
@given(words)
def test_any_text_is_a_method_or_refused(text: str) -> None:
    refused(lambda: parse_sum(text))
    refused(lambda: Method.parse(text))


@bounded
@given(st.sampled_from(sorted(fedflat.Experiment.__dataclass_fields__)), anything)
@example("rounds", 10**400)
@example("seed", "9" * 5000)
@example("lr", 10**400)
@example("method", "a\x1b[2J")
def test_any_value_of_a_field_is_used_or_refused(name: str, value: Any) -> None:
    refused(lambda: fedflat.Experiment(**{name: value}))
    refused(lambda: combinations({name: str(value)[:4000] if not isinstance(value, int) else hex(value)}))


@bounded
@given(st.integers(0, 10**9))
def test_any_toml_is_an_experiment_or_refused(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(mutate(fedflat.Experiment().to_toml().encode(), random.Random(number)))
    refused(lambda: fedflat.Experiment.from_toml(path))


@bounded
@given(st.integers(0, 10**9))
def test_any_damage_to_cifars_files_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    root = tmp_path_factory.getbasetemp() / f"cifar-{number % 2}"
    if not root.exists():
        root.mkdir()
        (write_cifar10_python if number % 2 else write_cifar10_binary)(root)
    luck = random.Random(number)
    path = luck.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    whole = path.read_bytes()
    try:
        path.write_bytes(mutate(whole, luck))
        refused(lambda: fedflat.load_federation("cifar10", root=root, partition="iid", clients=2))
    finally:
        path.write_bytes(whole)


ARRAYS = {
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "strings": np.array(["a", "b"]),
    "a number": np.array(3.0),
    "complex": np.ones(2, dtype=complex),
    "records": np.zeros(2, dtype=[("a", int)]),
}


def npz(path: Path, **arrays: Any) -> str:
    """What is said to a file with these arrays in place of good ones."""
    x, y = np.zeros((20, 4), dtype=np.float32), np.arange(20) % 2
    np.savez(path, **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | arrays))
    return refused(lambda: fedflat.load_federation(f"npz('{path}')", partition="iid", clients=2))


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("name", ["x_train", "y_train"])
def test_arrays_that_are_no_numbers_are_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    assert name in npz(tmp_path / "data.npz", **{name: ARRAYS[kind]})


def test_arrays_of_another_machine_are_read(tmp_path: Path) -> None:
    x = np.arange(80, dtype=">f4").reshape(20, 4)
    assert npz(tmp_path / "data.npz", x_train=x, y_train=(np.arange(20) % 2).astype(">i4")) == ""
    federation = fedflat.load_federation(f"npz('{tmp_path / 'data.npz'}')", partition="central", clients=1)
    assert federation.samples(0).batch(torch.arange(20))[0].sort(0).values.tolist() == x.tolist()


def test_one_absurd_label_is_refused_at_once(tmp_path: Path) -> None:
    assert "label 10000000" in npz(tmp_path / "data.npz", y_train=np.array([0] * 19 + [10**7]))


@pytest.mark.parametrize("labels", [[300] * 2, ["a", "b"], [-1, 0], 7, [[0], [1]], [0.5, 1]])
def test_wrong_labels_in_a_pickle_are_refused(tmp_path: Path, labels: Any) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": np.zeros((2, 3072), dtype=np.uint8), "labels": labels}))
    assert "labels" in refused(lambda: readers.read_cifar_pickle(path, ["labels"]))


def test_idx_sizes_that_overflow_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(struct.pack(">4I", 0x0803, 1 << 31, 1 << 31, 4) + b"x")
    assert "expected 18446744073709551632" in refused(lambda: readers.read_idx(tmp_path, "images", 3))


def test_a_packed_file_is_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "unpack_limit", lambda: 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(40 << 20)))
    assert "unpacks to more than 1 MB" in refused(lambda: readers.read_bytes(path))
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    assert readers.read_bytes(path) == bytes(1 << 20)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_file_is_refused_instead_of_waited_for(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = Path("data")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert "not a file" in refused(lambda: readers.read_bytes(path))
    assert "not a file" in refused(lambda: fedflat.load_federation("npz('data')", clients=2))


def test_an_image_beyond_pillows_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            image.new("RGB", (30, 30)).save(tmp_path / split / name / "1.png")
    data = f"folder('{tmp_path}', size=8)"
    assert refused(lambda: fedflat.load_federation(data, partition="iid", clients=2)) == ""
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 800)
    assert "30×30 pixels" in refused(lambda: fedflat.load_federation(data, partition="iid", clients=2))
    for size in (-1, 0, 10**9):
        assert "size must be" in refused(
            lambda size=size: fedflat.load_federation(f"folder('{tmp_path}', size={size})")
        )


def test_a_user_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = command("data", "digits", "--data-root", "~nosuchuser/x")
    assert status in (0, 2) and "unexpected" not in said
    assert "nosuchuser" in refused(lambda: fedflat.load_federation("npz('~nosuchuser/data.npz')", clients=2))


def test_a_model_that_does_not_fit_into_memory_says_how_much_it_wanted() -> None:
    status, said = command("run", "--data", "digits", "--model", "mlp(hidden=(10000000000,))", "--clients", "2")
    assert status in (1, 2) and "unexpected" not in said and "Traceback" not in said
    assert "fedflat.models" in said and "bytes" in said
    assert issubclass(DataError, InputError)
