"""What stays with the client: it is its state, it is never sent and never averaged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import restless
from parts.personal.federations import SIZES, federation, go
from torch import Tensor, nn

from fedflat import Federation, FlatModel, InputError
from fedflat.core.private import Private

# The network: Linear(4, 8), BatchNorm(8), ReLU, Dropout, Linear(8, 3).
BODY, NORM, STATISTICS, HEAD = 40, 16, 16, 27
SIZE = BODY + NORM + HEAD
GENERATED = "embedding=3, hidden=6"
MESSAGES: dict[str, int] = {
    "fedavg": SIZE + STATISTICS,
    "ditto": SIZE + STATISTICS,
    "pfedme": SIZE + STATISTICS,
    "apfl": SIZE + STATISTICS,
    "finetune": SIZE + STATISTICS,
    "lwsam": SIZE + STATISTICS,
    "plgu_lf(layers=1)": SIZE + STATISTICS,
    f"pfedhn({GENERATED})": SIZE + STATISTICS,
    f"plgu_ghn({GENERATED})": SIZE + STATISTICS,
    "fedrep(head_epochs=1)": BODY + NORM + STATISTICS,
    "fedper": BODY + NORM + STATISTICS,
    "fedbabu": BODY + NORM + STATISTICS,
    "plgu_grep": BODY + NORM + STATISTICS,
    f"pfedhn({GENERATED}, local_head=True)": BODY + NORM + STATISTICS,
    f"plgu_ghn({GENERATED}, local_head=True)": BODY + NORM + STATISTICS,
    "lg_fedavg": HEAD,
    "fedper(layers=2)": 0,
    "local_only": 0,
    "fedrep(head_epochs=1)+scaffold": 2 * (BODY + NORM) + STATISTICS,
    "lg_fedavg+scaffold": 2 * HEAD,
}


@pytest.mark.parametrize("method", MESSAGES)
def test_only_what_is_shared_travels(method: str) -> None:
    """Statistics go with the layer of their module."""
    row = go(method, restless(), rounds=1).metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (MESSAGES[method], MESSAGES[method])


@pytest.mark.parametrize(
    ("policy", "method", "count"),
    [
        ("silobn", "fedper", BODY + NORM),
        ("local", "fedper", BODY),
        ("silobn", "lg_fedavg", HEAD),
        ("local", "local_only", 0),
    ],
)
def test_policies_of_batchnorm_and_personal_layers_add_up(policy: str, method: str, count: int) -> None:
    run = go(method, restless(), batchnorm=policy, rounds=1)
    row = run.metrics[-1]
    assert (row["floats_down"], row["floats_up"]) == (count, count)


def server_model(run: Any) -> dict[str, Tensor]:
    return dict(run.model.state_dict())


PRIVATE = {
    "fedrep(head_epochs=1)": ("4.",),
    "fedper": ("4.",),
    "fedbabu": ("4.",),
    "plgu_grep": ("4.",),
    "lg_fedavg": ("0.", "1."),
    "fedper(layers=2)": ("0.", "1.", "4."),
    "local_only": ("0.", "1.", "4."),
}


@pytest.mark.parametrize("more", ["", "+scaffold", "+fedprox(mu=0.1)", "+fedavgm(beta=0.5)"])
@pytest.mark.parametrize("method", PRIVATE)
def test_on_the_server_private_tensors_stay_as_they_were_made(method: str, more: str) -> None:
    run, start = go(method + more, restless()), {k: v.double() for k, v in restless().state_dict().items()}
    for name, tensor in server_model(run).items():
        if not name.endswith("num_batches_tracked"):
            private = name.startswith(PRIVATE[method])
            assert torch.equal(tensor.double(), start[name]) == private, name


def test_the_servers_control_variate_knows_nothing_of_the_heads() -> None:
    run = go("fedrep(head_epochs=1)+scaffold", restless())
    c = run.server_state["scaffold"]["c"]
    assert not c[-HEAD:].any() and c[:-HEAD].any()


def test_shared_tensors_are_alike_at_every_client_and_private_ones_are_not() -> None:
    run = go("fedper", restless())
    states = [run.personal(i).state_dict() for i in (0, 1, 2, 4)]
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean"):
        assert all(torch.equal(state[name], states[0][name]) for state in states)
    assert all(not torch.equal(state["4.weight"], states[0]["4.weight"]) for state in states[1:])


def test_with_silobn_every_client_keeps_its_own_statistics_besides_its_head() -> None:
    run = go("fedper", restless(), batchnorm="silobn")
    states = [run.personal(i).state_dict() for i in (0, 1, 2, 4)]
    for state in states[1:]:
        assert torch.equal(state["1.weight"], states[0]["1.weight"])
        assert not torch.equal(state["1.running_mean"], states[0]["1.running_mean"])
        assert not torch.equal(state["4.weight"], states[0]["4.weight"])


def test_what_a_client_keeps_is_no_larger_than_what_stays_with_it() -> None:
    for method, size in (("fedper", HEAD), ("lg_fedavg", BODY + NORM + STATISTICS), ("local_only", SIZE + STATISTICS)):
        run = go(method, restless())
        kept = [t for state in run.client_state(1).values() for t in state.values() if t.is_floating_point()]
        assert sum(t.numel() for t in kept) == size


def test_a_client_that_diverges_keeps_what_it_had() -> None:
    data = federation()
    broken = [data.samples(i).batch(torch.arange(n)) for i, n in enumerate(SIZES)]
    broken[1] = (torch.full_like(broken[1][0], math.inf), broken[1][1])
    run = go("fedper", restless(), Federation(broken))
    assert [row["left_out"] for row in run.metrics] == [1, 1, 0]
    assert run.client_state(1) == {}
    assert run.server_weights.isfinite().all()


def test_a_name_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"1\.weight"):
        Private(FlatModel(nn.Linear(2, 2)), ["weight", "1.weight"])


def test_nothing_private_is_false() -> None:
    assert not Private(FlatModel(nn.Linear(2, 2)), ())
    assert Private(FlatModel(nn.Linear(2, 2)), ["bias"])
