"""Experiment: a TOML file and text from a command line are views of it; bad values are refused by name."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat import Experiment
from fedflat.errors import InputError, UnknownNameError
from fedflat.experiment import coerce

POSITIVE = st.floats(1e-300, 1e300)
EXPERIMENTS = st.builds(
    Experiment,
    method=st.sampled_from(["fedavg", "feddc(alpha=0.01)+man", 'npz(path="a\\\\b")', "line\nline", "naïve ω 𝄞", "\t"]),
    lr=POSITIVE,
    lr_decay=POSITIVE,
    clip=st.none() | POSITIVE,
    local_steps=st.none() | st.integers(0, 10**9),
    seed=st.integers(-(2**62), 2**62),
    drop_last=st.booleans(),
    head=st.none() | st.sampled_from(["fc", "layer3.1"]),
    workers=st.none() | st.integers(1, 64),
)


@given(EXPERIMENTS)
@settings(deadline=None, max_examples=60)
def test_a_toml_file_gives_the_same_experiment_back(tmp_path_factory: Any, experiment: Experiment) -> None:
    path = tmp_path_factory.getbasetemp() / "experiment.toml"
    path.write_bytes(experiment.to_toml().encode())
    assert Experiment.from_toml(path) == experiment


def test_a_toml_file_is_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_bytes(Experiment(head="naïve").to_toml().encode())
    script = (
        "import sys; from fedflat.experiment import Experiment; print(ascii(Experiment.from_toml(sys.argv[1]).head))"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, str(tmp_path / "e.toml")]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    assert done.stdout == "'na\\xefve'\n"


@given(EXPERIMENTS)
@settings(deadline=None, max_examples=50)
def test_text_for_every_field_gives_the_same_experiment_back(experiment: Experiment) -> None:
    assert Experiment.from_dict({name: str(value) for name, value in experiment.to_dict().items()}) == experiment


def test_text_is_brought_to_the_fields_type() -> None:
    exp = Experiment(lr="0.5", rounds="7", nesterov="True", momentum="0.9", clip="none", workers="None", clients=3.0)
    assert (exp.lr, exp.rounds, exp.nesterov, exp.clip, exp.workers, exp.clients) == (0.5, 7, True, None, None, 3)
    assert type(exp.clients) is int


@pytest.mark.parametrize("seed", [2**53 + 1, -(2**60) - 1, 12345678901234567891])
def test_whole_numbers_are_kept_to_the_last_digit(seed: int) -> None:
    assert Experiment(seed=seed).seed == seed
    assert coerce("seed", str(seed)) == seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", -0.1),
        ("lr", "fast"),
        ("lr", None),
        ("lr", [0.1]),
        ("lr_decay", 0.0),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("weight_decay", -1e-3),
        ("clip", 0.0),
        ("clip", math.nan),
        ("rounds", 0),
        ("rounds", 2.5),
        ("rounds", "many"),
        ("rounds", True),
        ("rounds", math.nan),
        ("clients", 0),
        ("local_epochs", -1),
        ("local_steps", -1),
        ("batch_size", -1),
        ("server_lr", -1.0),
        ("local_holdout", 1.0),
        ("workers", 0),
        ("nesterov", "maybe"),
        ("weighting", "sample"),
        ("dtype", "float16"),
        ("precision", "half"),
        ("evaluated", "sever"),
        ("augment", "paper00"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Experiment(**{field: value})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(InputError, match="nesterov"):
        Experiment(nesterov=True)


@pytest.mark.parametrize("make", [Experiment().replace, lambda **kw: Experiment.from_dict(kw)])
def test_an_unknown_field_is_answered_with_the_nearest(make: Any) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'batch_size'"):
        make(bach_size=3)


def test_a_choice_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'samples'"):
        Experiment(weighting="sample")


def test_differences_name_the_fields_that_change_a_result() -> None:
    here, there = Experiment(lr=0.1, seed=1, workers=1, backend="serial"), Experiment(lr=0.2, workers=2)
    differences = " ".join(here.differences(there))
    assert "lr: 0.2 there, 0.1 here" in differences
    assert "seed" in differences
    assert "workers" not in differences
    assert "backend" not in differences


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe", b"lr = 0.1\nlr = 0.2\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"mine\.toml"):
        Experiment.from_toml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        Experiment.from_toml(tmp_path / "nowhere.toml")


def test_an_experiment_can_be_read_without_torch() -> None:
    script = "import sys; from fedflat import Experiment; Experiment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("first", ["load_run", "Run", "Callback", "load_federation", "register"])
def test_run_is_a_function_whatever_was_used_before_it(first: str) -> None:
    run_python(f"import fedflat; fedflat.{first}; assert callable(fedflat.run), fedflat.run")
