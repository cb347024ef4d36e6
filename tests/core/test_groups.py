"""Layer groups: which tensors are one layer, in the sense of personal layers and of layer-wise curvature."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fedflat import FlatModel
from fedflat.core.groups import Group, layer_groups
from fedflat.errors import UnknownNameError
from fedflat.models import build_model

IMAGE = (3, 32, 32)


def names(groups: Sequence[Group]) -> list[set[str]]:
    return [{span.name for span in group.spans} for group in groups]


def flat_model(name: str) -> FlatModel:
    with torch.device("meta"):  # names and shapes, no numbers
        return FlatModel(build_model(name, IMAGE, 10))


@pytest.fixture(scope="module")
def resnet18() -> FlatModel:
    return flat_model("resnet18_gn")


@pytest.fixture(scope="module")
def wide() -> FlatModel:
    return flat_model("wrn28_10")


@pytest.mark.parametrize(("granularity", "count"), [("weight", 21), ("module", 41), ("tensor", 62)])
def test_resnet18_has_21_weight_layers_41_modules_62_tensors(resnet18: FlatModel, granularity: str, count: int) -> None:
    assert len(layer_groups(resnet18, granularity)) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 21), ("resnet50_gn", 54), ("wrn28_10", 29), ("mobilenetv2", 53)],
)
def test_the_papers_networks_have_as_many_weight_layers_as_counted(name: str, count: int, wide: FlatModel) -> None:
    flat = wide if name == "wrn28_10" else flat_model(name)
    groups = layer_groups(flat)
    assert len(groups) == count
    assert_divides(flat, groups)
    assert_one_weight_each(flat, groups)


def assert_divides(flat: FlatModel, groups: Sequence[Group]) -> None:
    """Every parameter is in one group and no other."""
    spans = sorted((span.start, span.stop) for group in groups for span in group.spans)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert sum(group.size for group in groups) == flat.size


def assert_one_weight_each(flat: FlatModel, groups: Sequence[Group]) -> None:
    weights = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for group in groups:
        owners = [flat.module.get_submodule(name) for name in group.owners]
        assert sum(isinstance(owner, weights) for owner in owners) == 1


@pytest.mark.parametrize("granularity", ["weight", "module", "tensor"])
def test_every_granularity_divides_the_parameters(resnet18: FlatModel, granularity: str) -> None:
    assert_divides(resnet18, layer_groups(resnet18, granularity))


def test_a_normalisation_joins_the_layer_that_feeds_it() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    groups = layer_groups(FlatModel(net))
    assert names(groups) == [{"0.weight", "0.bias", "1.weight", "1.bias"}, {"4.weight", "4.bias"}]
    assert groups[0].owners == {"0", "1"}  # whose buffers go with it
    assert [group.size for group in groups] == [36 + 4 + 4 + 4, 10]


def test_a_norm_before_the_first_weight_layer_joins_the_one_that_follows() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert names(layer_groups(FlatModel(net))) == [
        {"0.weight", "0.bias", "1.weight", "1.bias"},
        {"3.weight", "3.bias"},
    ]


def test_in_wide_resnets_a_normalisation_joins_the_layer_that_it_precedes(wide: FlatModel) -> None:
    """Pre-activation: norm, ReLU, convolution; the last norm goes with the classifier."""
    owners = list(dict.fromkeys(span.name.rpartition(".")[0] for span in wide.spans))
    group_of = {owner: group.name for group in layer_groups(wide) for owner in group.owners}
    weights = [owner for owner in owners if "norm" not in owner]
    wrong = {}
    for place, owner in enumerate(owners):
        if "norm" in owner:
            following = next(other for other in owners[place:] if other in weights)
            if group_of[owner] != following:
                wrong[owner] = group_of[owner]
    assert wrong == {}


def test_parameters_without_a_layer_of_their_own_are_not_lost() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).bias.detach().clone()))
            self.fc = nn.Linear(3, 2)

    flat = FlatModel(Scaled())
    for granularity in ("weight", "module", "tensor"):
        assert_divides(flat, layer_groups(flat, granularity))


def test_an_unknown_granularity_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="weight"):
        layer_groups(FlatModel(nn.Linear(2, 2)), "wieght")
