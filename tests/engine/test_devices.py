"""Runs on a make-believe accelerator have the CPU's bits, wherever clients train, and say what cannot be."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from helpers import assert_same_run, network, plain, restless, world
from make_believe import HERE, KIND, on_make_believe
from parts.conformance.harness import StopAfter

import fedflat
from fedflat import InputError
from fedflat.core.devices import KINDS, prepared, present, resolve
from fedflat.errors import CheckpointError, RunError

SETTINGS = {"method": "scaffold+diary", "rounds": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5}


def result(device: str, **changes: object) -> fedflat.Run:
    return fedflat.run(plain(**(SETTINGS | changes), device=device), federation=world(), model=restless())


@on_make_believe
def test_one_device_and_two_give_the_bits_of_the_cpu() -> None:
    expected = result("cpu")
    for device in ("gpu:0", "gpu:1", "gpu:0,gpu:1"):
        assert_same_run(result(device), expected, 3)


@pytest.mark.parametrize("device", ["gpu:0", "gpu:0,gpu:1"])
@on_make_believe
def test_workers_are_forked_before_the_main_process_touches_a_device(device: str) -> None:
    pooled = result(device, backend="pool", workers=2)
    assert not KIND.used
    assert not HERE.copies
    assert_same_run(pooled, result("cpu"), 3)


@on_make_believe
def test_a_process_that_has_used_the_device_trains_itself_and_says_so() -> None:
    expected, told = result("gpu:0"), list[str]()
    noting = logging.Handler()
    noting.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedflat").addHandler(noting)
    assert_same_run(result("gpu:0", backend="pool"), expected, 3)
    assert any("in this process" in message for message in told)


def test_auto_takes_the_cpu_where_there_is_no_cuda() -> None:
    if any(device.type == "cuda" for device in present()):
        pytest.skip("this machine has CUDA")
    assert [device.type for device in resolve("auto")] == ["cpu"]


@pytest.mark.parametrize("text", ["cdua", "cuda:99", "cuda:x", "gpu:0", "cpu,"])
def test_an_unknown_or_absent_device_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(InputError, match="this machine has: cpu"):
        resolve(text)


@pytest.mark.parametrize("policy", ["average", "local", "silobn", "recompute"])
@on_make_believe
def test_every_policy_of_batchnorm_has_the_bits_of_the_cpu(policy: str) -> None:
    there, here = (result(device, batchnorm=policy, method="fedavg") for device in ("gpu:0,gpu:1", "cpu"))
    assert_same_run(there, here, 3)


@on_make_believe
def test_a_run_is_not_resumed_on_another_kind_of_device(tmp_path: Path) -> None:
    there = plain(**SETTINGS, device="gpu:1")
    fedflat.run(there, federation=world(), model=restless(), out=tmp_path / "run", callbacks=[StopAfter(1)])
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["device"] == "gpu:1"
    with pytest.raises(CheckpointError, match="continue with device='gpu'"):
        fedflat.run(there.replace(device="cpu"), federation=world(), model=restless(), out=tmp_path / "run")
    resumed = fedflat.run(there.replace(device="gpu:0"), federation=world(), model=restless(), out=tmp_path / "run")
    assert_same_run(resumed, result("cpu"), 3)


@on_make_believe
def test_data_that_do_not_fit_stay_in_the_hosts_memory() -> None:
    """The tensors of a client are copied once; without room each batch is, and the bits are the same."""
    KIND.room = 1 << 20, 1 << 20
    fitting = result("gpu:0", local_epochs=3, data_share=1.0)
    few = HERE.copies["cpu to gpu"]
    assert_same_run(result("gpu:0", local_epochs=3, data_share=0.0), fitting, 3)
    assert HERE.copies["cpu to gpu"] > 2 * few
    assert_same_run(result("cpu", local_epochs=3), fitting, 3)


@on_make_believe
def test_lack_of_memory_names_client_model_batch_free_memory_and_remedies(tmp_path: Path) -> None:
    KIND.room, HERE.limit = (5 << 20, 9 << 20), None
    e = plain(**SETTINGS, device="gpu:0")

    class Full(fedflat.Callback):
        def round(self, run: fedflat.Run, metrics: object) -> None:
            HERE.limit = 200  # bytes: less than the first layer's output

    with pytest.raises(RunError) as failed:
        fedflat.run(e, federation=world(), model=restless(), out=tmp_path / "run", callbacks=[Full()])
    for word in ("client", "round 2", "Sequential", "batch_size=4", "5 of 9 MiB", "workers", "data_share=0"):
        assert word in str(failed.value)
    HERE.limit = None
    resumed = fedflat.run(e, federation=world(), model=restless(), out=tmp_path / "run")
    assert_same_run(resumed, result("cpu"), 3)


@on_make_believe
def test_trials_of_stacks_leave_this_process_able_to_fork() -> None:
    stacked = {"stack": 2, "method": "scaffold", "rounds": 1}
    here = plain(**stacked, device="gpu:0", backend="pool", workers=1)
    there = fedflat.run(here, federation=world((8, 8, 8, 8)), model=network())
    assert not KIND.used
    expected = fedflat.run(here.replace(device="cpu"), federation=world((8, 8, 8, 8)), model=network())
    assert_same_run(there, expected, 4)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_cuda_is_prepared_for_the_same_bits_and_for_tf32_only_if_asked(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switches that PyTorch reads; without a GPU they can be set, but not be seen to work."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with prepared(torch.device("cuda:0")):
        KINDS["cuda"].prepare(torch.device("cuda:0"), precision)
        tf32 = precision == "tf32"
        assert switches() == {"strict": True, "warns": True, "benchmark": False, "products": tf32, "convolutions": tf32}
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before  # an analysis leaves the user's process as it was


def switches() -> dict[str, bool]:
    return {
        "strict": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "products": torch.backends.cuda.matmul.allow_tf32,
        "convolutions": torch.backends.cudnn.allow_tf32,
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"precision": "tf32"}, "device='cpu' has no precision='tf32'; it has: float32, bfloat16"),
        ({"precision": "float16"}, "use 'bfloat16'"),
        ({"precision": "tf32", "dtype": "float64"}, "leave precision at 'float32'"),
    ],
)
def test_a_precision_that_a_device_does_not_have_is_refused(settings: dict[str, str], told: str) -> None:
    with pytest.raises(InputError) as refused:
        fedflat.run(plain(**({"dtype": "float32", "device": "cpu"} | settings)), federation=world(), model=network())
    assert told in str(refused.value)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_real_device_agrees_with_the_cpu_and_with_itself(device: str) -> None:
    if not any(found.type == device for found in present()):
        pytest.skip(f"this machine has no {device}")
    here, *there = (result(where, dtype="float32", method="scaffold") for where in ("cpu", device, device))
    assert there[0].weights.equal(there[1].weights)
    assert (there[0].weights - here.weights).abs().max() < 1e-3 * here.weights.abs().max()
