"""Blocks of the Hessian by layer, tensor and channel; activations; differences between clients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from analysis.worlds import blobs, convnet, eigenvalues, images, network, small
from fedflat import FlatModel, analysis
from fedflat.analysis.cross_client import compare_diagonals
from fedflat.core.groups import layer_groups
from fedflat.models import build_model


def test_layer_blocks_are_those_of_the_dense_hessian() -> None:
    model, x, y, dense = small()
    rows = analysis.layer_curvature(model, (x, y), probes=200, tol=1e-12).rows
    for row, block in zip(rows, (dense[:25, :25], dense[25:, 25:]), strict=True):
        exact = eigenvalues(block)
        assert (row.largest, row.smallest) == pytest.approx((float(exact[0]), float(exact[-1])), rel=1e-8, abs=1e-12)
        assert abs(row.trace - float(block.trace())) < 4 * row.trace_error
        assert row.largest <= float(eigenvalues(dense)[0]) + 1e-12  # interlacing
    assert [row.parameters for row in rows] == [25, 18]


def test_channel_blocks_are_those_of_the_dense_hessian() -> None:
    model, x, y, dense = small()
    rows = analysis.channel_curvature(model, (x, y), "2", probes=1, channels=[2, 0]).rows
    for row, channel in zip(rows, (2, 0), strict=True):
        places = [*range(25 + 5 * channel, 30 + 5 * channel), 40 + channel]
        assert row.name == f"2[{channel}]" and row.parameters == 6
        assert row.largest == pytest.approx(float(eigenvalues(dense[places][:, places])[0]), rel=1e-8)


def test_tensors_are_groups_too() -> None:
    model, x, y, dense = small()
    rows = analysis.layer_curvature(model, (x, y), granularity="tensor", layers=["2.bias"], probes=1).rows
    assert rows[0].largest == pytest.approx(float(eigenvalues(dense[40:, 40:])[0]), rel=1e-8)


def test_input_moments_are_mean_squares_of_what_enters() -> None:
    model, (x, y) = network(), blobs(20)
    rows = analysis.layer_curvature(model, (x, y), probes=1, batch_size=7).rows
    hidden = model[:2](x).detach()
    for row, entering in zip(rows, (x, hidden), strict=True):
        assert row.input_moment == pytest.approx(float(entering.square().mean()), rel=1e-12)
        assert row.input_norm == pytest.approx(float(entering.square().sum(1).mean()), rel=1e-12)


def test_input_norm_bounds_the_last_layer() -> None:
    """λ_max of a softmax layer is at most ½·mean of (‖a‖² + 1): the bound that MAN lowers."""
    row = analysis.layer_curvature(network(), blobs(20), layers=["2"], probes=1).rows[0]
    assert row.largest <= (row.input_norm + 1) / 2


@pytest.mark.parametrize(("name", "layers"), [("resnet18_gn", 21), ("resnet50_gn", 54), ("wrn28_10_gn", 29)])
def test_one_group_a_weight_layer(name: str, layers: int) -> None:
    with torch.device("meta"):
        module = build_model(name, (3, 32, 32), 10)
    groups = layer_groups(FlatModel(module))
    assert len(groups) == layers
    assert sum(group.size for group in groups) == sum(p.numel() for p in module.parameters())


def test_normalisations_join_the_layer_before() -> None:
    groups = layer_groups(FlatModel(convnet(), torch.float64))
    assert [(group.name, len(group.spans)) for group in groups] == [("0", 4), ("5", 2), ("7", 2)]
    modules = layer_groups(FlatModel(convnet(), torch.float64), "module")
    assert [group.name for group in modules] == ["0", "1", "5", "7"]
    before = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    assert [group.name for group in layer_groups(FlatModel(before))] == ["1"]


def test_layers_can_be_told_and_drawn() -> None:
    table = analysis.layer_curvature(convnet(), images(6), probes=1)
    assert [row["name"] for row in table.to_dict()["rows"]] == ["0", "5", "7"]
    assert table.plot().axes


Q = torch.tensor([[1.0, 2.0, 2.0], [4.0, 0.0, 0.0], [0.0, 3.0, 4.0]], dtype=torch.float64)


def test_difference_of_lengths_and_directions() -> None:
    lengths, cosines = compare_diagonals(Q)
    assert lengths == pytest.approx((1 + 4 + 1) / 3)
    assert cosines == pytest.approx((1 / 3 + 14 / 15 + 0) / 3)


def test_conventions_convert() -> None:
    """N_all = (M−1)/M · N, D_all = (1 + (M−1)·D)/M."""
    (n, d), (n_all, d_all) = compare_diagonals(Q), compare_diagonals(Q, "all")
    assert n_all == pytest.approx(2 / 3 * n) and d_all == pytest.approx((1 + 2 * d) / 3)


def test_length_does_not_change_directions() -> None:
    assert compare_diagonals(Q * torch.tensor([[1.0], [7.0], [1.0]]))[1] == pytest.approx(compare_diagonals(Q)[1])


@pytest.mark.parametrize("diagonal", ["element", "tensor_trace"])
def test_identical_clients_do_not_differ(diagonal: str) -> None:
    model, data = network(), blobs(12)
    found = analysis.cross_client([model] * 3, [data] * 3, diagonal=diagonal, probes=3)
    assert found.norm == 0.0 and found.direction == pytest.approx(1, rel=1e-12)
    assert found.diagonals.shape == (3, 43 if diagonal == "element" else 4)


def other(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p *= 1.5
    return model


def test_global_data_is_the_union() -> None:
    models, data = [network(), other(network())], [blobs(12), blobs(20, seed=4)]
    union = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    found = analysis.cross_client(models, data, on="global", probes=2)
    expected = [diagonal(model, union) for model in models]
    torch.testing.assert_close(found.diagonals, torch.stack(expected), rtol=1e-10, atol=1e-14)
    own = analysis.cross_client(models, data, probes=2)
    torch.testing.assert_close(own.diagonals[1], diagonal(models[1], data[1]), rtol=1e-10, atol=1e-14)
    told = own.to_dict()
    assert (told["norm"], told["direction"]) == (own.norm, own.direction) and "diagonals" not in told
    assert [each["samples"] for each in told["conditions"]] == [12, 20]


def diagonal(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    found = analysis.hessian_diagonal(model, data, probes=2).diagonal
    assert found is not None
    return found
