"""What a method string must not say, and what a part refuses or warns about."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat import Experiment, InputError
from fedflat.core.method import Method
from fedflat.parts.global_sam import FedGF

from .harness import make_world, run_library
from .reference import Mlp

NET = Mlp(3, 5, 2)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("fedporx", "fedprox"),
        ("fedavg+saam", "sam"),
        ("scafold", "scaffold"),
        ("sam(roh=0.1)", "rho"),
        ("fedsam(roh=0.1)", "rho"),
        ("swa(cycel=5)", "cycle"),
        ("const(centre=True)", "center"),
    ],
)
def test_an_unknown_part_or_field_is_answered_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(InputError, match=nearest):
        Method.parse(text)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("fedgf(threshold=1e999)", "threshold takes a finite number or None, not inf"),
        ("fedgf(threshold=inf)", "values must be finite numbers"),
        ("fedgf(rho_g='x')", "rho_g takes a finite number or None, not 'x'"),
        ("fedadagrad(v_init='x')", "v_init takes a finite number or None, not 'x'"),
        ("gradaug(resolutions=8)", "resolutions takes a tuple of whole numbers, not 8"),
    ],
)
def test_what_a_field_takes_is_said_in_words(text: str, allowed: str) -> None:
    with pytest.raises(InputError, match=allowed):
        Method.parse(text)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"threshold": math.inf}, "fedgf: threshold takes a finite number or None, not inf"),
        ({"threshold": "x"}, "fedgf: threshold takes a finite number or None, not 'x'"),
        ({"rho": None}, "fedgf: rho takes a finite number, not None"),
        ({"rho": math.nan}, "fedgf: rho takes a finite number, not nan"),
        ({"rho": True}, "fedgf: rho takes a finite number, not True"),
        ({"window": 2.5}, "fedgf: window takes a whole number, not 2.5"),
    ],
)
def test_the_same_holds_for_a_part_that_is_made_in_python(given: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InputError, match=allowed):
        FedGF(**given)
    assert FedGF(threshold=None, rho=1, window=np.int64(3)) == FedGF(threshold=None, rho=1.0, window=3)


OUT_OF_RANGE = [
    "fedprox(mu=-0.1)",
    "fedavgm(beta=1.0)",
    "fedavgm(beta=-0.1)",
    "fedadam(beta1=1.0)",
    "fedadam(beta2=1.0)",
    "fedadam(beta2=-0.1)",
    "fedadam(tau=-0.1)",
    "fedadam(tau=0.0, v_init=0.0)",
    "fedadam(v_init=-1.0)",
    "fedadagrad(tau=-0.1)",
    "fedadagrad(v_init=-1.0)",
    "fedyogi(beta1=1.0)",
    "fedyogi(beta2=1.5)",
    "fedyogi(tau=-0.1)",
    "scaffold(option=0)",
    "scaffold(option=3)",
    "feddyn(alpha=-0.1)",
    "feddc(alpha=-0.1)",
    "adabest(beta=-0.1)",
    "adabest(mu=-0.1)",
    "moon(mu=-0.1)",
    "moon(temperature=0.0)",
    "sam(rho=-0.1)",
    "asam(rho=-0.1)",
    "asam(eta=-0.1)",
    "mofedsam(beta=1.1)",
    "mofedsam(beta=-0.1)",
    "mofedsam(rho=-0.1)",
    "fedspeed(rho=-0.1)",
    "fedspeed(alpha=-0.1)",
    "fedspeed(mix=1.1)",
    "fedspeed(mix=-0.1)",
    "fedspeed(server='cloud')",
    "man(zeta=-0.1)",
    "const(mode='cube')",
    "swa(cycle=0)",
    "swa(cycle=-1)",
    "swa(start=-0.1)",
    "swa(lr_min=-0.1)",
    "swa(collect='never')",
]
WRONG_KIND = [
    "sam(rho='big')",
    "sam(rho=None)",
    "sam(rho=1e999)",
    "fedprox(mu=1e999)",
    "fedprox(mu='x')",
    "feddyn(alpha=(1, 2))",
    "scaffold(option='two')",
    "swa(cycle=2.5)",
    "swa(cycle='ten')",
    "fedadam(v_init='zero')",
    "const(mode=3)",
    "man(zeta='a')",
]


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_a_value_outside_its_range_is_refused_naming_part_and_field(text: str) -> None:
    part, field = text.split("(")[0], text.split("(")[1].split("=")[0]
    with pytest.raises(InputError) as caught:
        Method.parse(text)
    assert part in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("text", WRONG_KIND)
def test_a_value_of_the_wrong_kind_is_refused_naming_the_part(text: str) -> None:
    with pytest.raises(InputError, match=text.split("(")[0]):
        Method.parse(text)


@pytest.mark.parametrize("text", ["fedsam(rho=-0.1)", "fedasam(eta=-0.1)", "fedconst(mode='cube')", "fedman(zeta=-1)"])
def test_an_alias_refuses_what_its_part_refuses(text: str) -> None:
    with pytest.raises(InputError, match=text.split("(")[0].removeprefix("fed")):
        Method.parse(text)


@pytest.mark.parametrize("momentum", [1.0, 1.5, -0.1])
def test_a_client_momentum_outside_zero_to_one_is_refused(momentum: float) -> None:
    with pytest.raises(InputError, match="momentum"):
        Experiment(momentum=momentum)


def told(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, part: str) -> list[str]:
    """What was said about a part, by log or by warning."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in (*said, *(str(w.message) for w in recwarn)) if part in message]


@pytest.mark.parametrize("start", [1.0, 1.5, 4])
def test_swa_that_starts_after_the_last_round_is_refused_or_warned_about(
    start: float, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    try:
        run_library(make_world(NET), f"swa(start={start})")
    except InputError as error:
        assert "swa" in str(error)
        return
    assert told(caplog, recwarn, "swa")


@pytest.mark.parametrize(("start", "aligned"), [(3, False), (4, True)])
def test_swa_warns_where_its_cycle_does_not_divide_the_round_at_which_it_begins(
    start: int, aligned: bool, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    world = make_world(NET, participants=((0, 1), (2, 3)) * 4)
    run_library(world, f"swa(start={start}, cycle=2)")
    said = told(caplog, recwarn, "swa")
    assert ("start=2 or start=4" in said[0]) if not aligned else not said
    caplog.clear()
    run_library(world, f"swa(start={start}, cycle=2, collect='cycle_end')")
    assert not told(caplog, recwarn, "swa")


def test_swa_that_would_never_collect_is_refused_or_warned_about(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    try:
        run_library(make_world(NET), "swa(start=0.5, cycle=10)")
    except InputError as error:
        assert "swa" in str(error)
        return
    assert told(caplog, recwarn, "swa")


def test_const_says_once_that_it_skips_a_layer_with_fewer_than_three_inputs(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    run_library(make_world(Mlp(2, 5, 2)), "const")
    assert len(told(caplog, recwarn, "const")) == 1
    assert "0.weight" in told(caplog, recwarn, "const")[0]


class Headless(nn.Module):
    """A network without a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 4, 3)
        self.outer = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x[:, None]).relu()).mean(2)


def test_moon_on_a_model_without_features_says_how_to_name_them() -> None:
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"moon.*features="):
        run_library(make_world(NET), "moon", module=Headless())


def test_moon_takes_the_features_that_are_named() -> None:
    torch.manual_seed(0)
    assert run_library(make_world(NET), "moon", module=Headless(), features="inner").weights.isfinite().all()


@pytest.mark.parametrize("part", ["feddyn", "feddc", "adabest", "fedspeed", "fedspeed(server='paper')"])
def test_a_server_rate_is_refused_by_a_part_with_a_server_step_of_its_own(part: str) -> None:
    with pytest.raises(InputError, match=rf"{part.split('(')[0]}.*server_lr"):
        run_library(make_world(NET, server_lr=0.5), part)
