"""What the personalised methods refuse, naming the part and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import network
from torch import nn

from fedflat import InputError
from fedflat.core.method import Method
from parts.personal.federations import SIZES, federation, go

HEADS = ("fedrep", "fedbabu", "lg_fedavg", "plgu_grep", "pfedhn(local_head=True)")


@pytest.mark.parametrize("method", HEADS)
def test_a_head_that_the_network_does_not_have_is_refused_with_those_it_has(method: str) -> None:
    with pytest.raises(InputError, match=r"'nope'.*0, 1, 2"):
        go(method, network(), head="nope")


@pytest.mark.parametrize("method", HEADS)
def test_a_head_without_weights_is_no_place_to_split(method: str) -> None:
    """Layer 1 is a Tanh: there would be nothing to keep, or nothing to share."""
    with pytest.raises(InputError, match="head"):
        go(method, network(), head="1")


@pytest.mark.parametrize("method", HEADS)
def test_a_network_without_a_linear_layer_is_told_to_name_its_head(method: str) -> None:
    name = method.split("(")[0]
    with pytest.raises(InputError, match=rf"{name}.*head="):
        go(method, nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten()).double())


@pytest.mark.parametrize(
    ("method", "part", "count"),
    [
        ("fedper(layers=3)", "fedper", "2"),
        ("plgu_lf", "plgu_lf", "2"),
        ("plgu_lf(layers=3)", "plgu_lf", "2"),
        ("plgu_lf(layers=5, granularity='tensor')", "plgu_lf", "4"),
    ],
)
def test_more_personal_layers_than_layers_are_refused_saying_how_many_there_are(
    method: str, part: str, count: str
) -> None:
    with pytest.raises(InputError, match=rf"{part}.*layers=\d.*{count}"):
        go(method, network())


@pytest.mark.parametrize("part", ["pfedhn", "plgu_ghn"])
def test_fewer_embeddings_than_clients_are_refused(part: str) -> None:
    with pytest.raises(InputError, match=rf"{part}.*{len(SIZES)} clients.*embeddings=4"):
        go(f"{part}(embeddings=4)", network())
    go(f"{part}(embeddings=4)", network(), new_clients=1, rounds=1, participants=lambda t: [0])  # new ones need none


@pytest.mark.parametrize("method", ["finetune", "fedbabu"])
def test_tuning_for_an_evaluation_that_never_comes(method: str) -> None:
    """FineTune does nothing else, so it says so; FedBABU trains all the same."""
    for changes in ({"data": federation(with_tests=False)}, {"evaluate_clients": None}):
        if method == "finetune":
            with pytest.raises(InputError, match=r"finetune.*test data.*evaluate_clients"):
                go(method, network(), **changes)
        else:
            assert go(method, network(), **changes).evaluations == []


@pytest.mark.parametrize("count", [5, 6])
def test_new_clients_must_leave_some_to_train(count: int) -> None:
    with pytest.raises(InputError, match=rf"new_clients={count}.*5 clients"):
        go("fedavg", network(), new_clients=count)


@pytest.mark.parametrize(("name", "value"), [("new_clients", -1), ("evaluate_clients", -1), ("new_clients", 1.5)])
def test_experiment_fields_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        go("fedavg", network(), **{name: value})


def test_a_new_client_cannot_be_asked_to_train() -> None:
    with pytest.raises(InputError, match="4"):
        go("fedavg", network(), new_clients=1, participants=lambda t: [0, 4])


@pytest.mark.parametrize("client", [-1, 5])
def test_a_client_that_does_not_exist_has_no_personal_model(client: int) -> None:
    run = go("ditto", network())
    with pytest.raises(InputError, match=f"no client {client}"):
        run.personal(client)


def test_a_client_that_never_took_part_has_no_personal_model() -> None:
    run = go("ditto", network())
    with pytest.raises(InputError, match=r"ditto.*client 3"):
        run.personal(3)


OUT_OF_RANGE = [
    "ditto(lam=-0.1)",
    "ditto(epochs=-1)",
    "pfedme(lam=-1.0)",
    "pfedme(steps=0)",
    "pfedme(lr=-0.1)",
    "pfedme(beta=-0.1)",
    "pfedme(mu=-0.1)",
    "fedrep(head_epochs=-1)",
    "fedper(layers=-1)",
    "fedbabu(epochs=-1)",
    "fedbabu(tune='neck')",
    "finetune(epochs=-1)",
    "apfl(alpha=-0.1)",
    "apfl(alpha=1.1)",
    *(f"{part}(rho=-0.1)" for part in ("lwsam", "plgu_lf", "plgu_grep", "plgu_ghn")),
    *(f"{part}(score='max')" for part in ("lwsam", "plgu_lf", "plgu_grep", "plgu_ghn")),
    *(f"{part}(granularity='layer')" for part in ("lwsam", "plgu_lf", "plgu_grep", "plgu_ghn")),
    "lwsam(p=1.0)",
    "plgu_lf(layers=-1)",
    "plgu_lf(perturb_at='v')",
    "plgu_lf(ascent_grad='v')",
    "plgu_grep(body_epochs=-1)",
    "plgu_grep(body_steps=-1)",
    "plgu_grep(score_source='last')",
    "plgu_ghn(evaluate='both')",
    "pfedhn(embedding=0)",
    "pfedhn(hidden=0)",
    "pfedhn(depth=-1)",
    "pfedhn(lr=-0.1)",
    "pfedhn(momentum=1.0)",
    "pfedhn(decay=-0.1)",
    "pfedhn(clip=0.0)",
    "pfedhn(clip=-1.0)",
    "pfedhn(chunk=-1)",
    "pfedhn(embeddings=0)",
]


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_naming_part_and_field(text: str) -> None:
    part, field = text.split("(")[0], text.split("(")[1].split("=")[0]
    with pytest.raises(InputError, match=rf"{part}.*{field}"):
        Method.parse(text)


@pytest.mark.parametrize(
    ("text", "nearest"), [("dito", "ditto"), ("fedreb", "fedrep"), ("plgu_lf(layer=1)", "layers"), ("afpl", "apfl")]
)
def test_an_unknown_part_or_field_is_answered_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(InputError, match=nearest):
        Method.parse(text)
