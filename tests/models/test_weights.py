"""Weights of other packages: their names of layers, heads and normalisations that differ, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedflat.errors import DataError, InputError
from fedflat.models import build_model
from fedflat.models.weights import load_weights

LAYERS = Path(__file__).with_name("foreign_layers.txt").read_text().splitlines()[2:]
NETWORKS = {
    "torchvision.resnet18": "resnet18_imagenet",
    "torchvision.mobilenet_v2": "mobilenetv2(norm='bn')",
    "timm.mobilenetv2_100": "mobilenetv2(norm='bn')",
}


def state(network: str) -> dict[str, Tensor]:
    """A state dict with this package's names and shapes; every tensor is filled with a number of its own."""
    tensors: dict[str, Tensor] = {}
    for name, layer, text in (line.split() for line in LAYERS):
        shape = [int(side) for side in text.split("x")]
        if name == network:
            more = {1: ("bias", "running_mean", "running_var"), 2: ("bias",)}.get(len(shape), ())
            tensors[f"{layer}.weight"] = torch.full(shape, float(len(tensors)))
            for tensor in more:
                tensors[f"{layer}.{tensor}"] = torch.full(shape[:1], float(len(tensors)))
            if len(shape) == 1:
                tensors[f"{layer}.num_batches_tracked"] = torch.tensor(len(tensors))
    return tensors


@pytest.mark.parametrize(("network", "ours"), NETWORKS.items())
def test_layers_of_other_packages_find_their_place(network: str, ours: str, tmp_path: Path) -> None:
    """Both packages list the same layers in the same order."""
    theirs, model = state(network), build_model(ours, (3, 64, 64), 1000)
    save_file(theirs, tmp_path / "w.safetensors")
    report = load_weights(model, tmp_path / "w.safetensors")
    assert f"{len(theirs)} of {len(theirs)} tensors taken" in report and network.split(".")[0] in report
    mine = list(model.state_dict().values())
    assert [t.flatten()[0].item() for t in mine] == [t.flatten()[0].item() for t in theirs.values()]


def test_batchnorm_there_and_groupnorm_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, model = state("torchvision.mobilenet_v2"), build_model("mobilenetv2", (3, 64, 64), 203)
    torch.save(theirs, tmp_path / "w.pth")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = load_weights(model, tmp_path / "w.pth")
    after = model.state_dict()
    changed = {name for name in after if not after[name].equal(before[name])}
    assert changed == {name for name in after if after[name].dim() == 4}  # the convolutions, and nothing else
    assert "52 of 158 tensors taken" in report and report in caplog.text
    assert "1000 outputs there and 203 here: it starts anew" in report
    assert "52 layers are BatchNorm there and GroupNorm here: they start anew" in report


@pytest.mark.parametrize(
    ("network", "ours", "hint"),
    [
        ("torchvision.resnet18", "resnet18", r"'stem.conv.weight' is \(64, 3, 7, 7\) there and \(64, 3, 3, 3\) here"),
        ("torchvision.resnet18", "resnet50", "does not fit the model"),
        ("timm.mobilenetv2_100", "resnet18_imagenet", "does not fit the model"),
    ],
)
def test_weights_of_another_architecture_are_refused(network: str, ours: str, hint: str, tmp_path: Path) -> None:
    save_file(state(network), tmp_path / "w.safetensors")
    model = build_model(ours, (3, 64, 64), 1000)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InputError, match=hint):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": [1, 2, 3]}, tmp_path / "list.pth")
    (tmp_path / "text.pt").write_text("no weights")
    for name in ("list.pth", "text.pt"):
        with pytest.raises(DataError, match="holds no"):
            load_weights(nn.Linear(2, 2), tmp_path / name)


class Anything:
    """What a file of tensors alone does not hold."""


@pytest.mark.parametrize("content", [b"", b"abc", b"\x80\x02", b"(lp0\n."])
def test_a_file_that_is_no_state_dict_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(DataError, match=r"w\.pth holds no (weights that can be read safely|state dict)"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.pth")


def test_objects_in_a_file_are_refused_without_advice_to_trust_it(tmp_path: Path) -> None:
    torch.save({"weights": Anything()}, tmp_path / "w.pth")
    with pytest.raises(DataError, match="read safely: it is no file of tensors alone") as caught:
        load_weights(nn.Linear(2, 2), tmp_path / "w.pth")
    assert "trust" not in str(caught.value) and "\x1b" not in str(caught.value)
