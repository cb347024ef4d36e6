"""Published client lists, PACS with a domain left out, Landmarks by photographer, and weights from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedflat
from fedflat.data.arrays import Targets
from fedflat.data.given import given
from fedflat.data.photographs import DOMAINS
from fedflat.errors import DataError, InputError, PartitionError
from fedflat.models import build_model
from fedflat.models.weights import load_weights

Image = pytest.importorskip("PIL.Image")
TARGETS = Targets(np.arange(12) % 3, 3)
RNG = np.random.default_rng(0)


def divided(path: Path, text: str, clients: int = 2) -> list[list[int]]:
    path.write_text(text)
    found = given(TARGETS, clients, RNG, str(path))
    return [found.indices(i).tolist() for i in range(len(found))]


def leaf(key: str, *lists: list[str]) -> str:
    """Users are whole numbers and their keys strings; num_samples is wrong, as in FedGloSS's files."""
    data = {str(user): {"x": names} for user, names in enumerate(lists)}
    return json.dumps({"users": list(range(len(lists))), "num_samples": [50] * len(lists), key: data})


def test_published_lists_of_clients(tmp_path: Path) -> None:
    names = [[f"img_{i}_label_{i % 3}.png" for i in some] for some in ([4, 1], [0, 11, 7])]
    for key in ("user_data", "users_data"):
        assert divided(tmp_path / "a.json", leaf(key, *names)) == [[4, 1], [0, 11, 7]]
    assert divided(tmp_path / "a.txt", "{0: [4, 1], 1: [0, 11]}") == [[1, 4], [0, 11]]
    assert divided(tmp_path / "a.txt", "{0: {4, 1}, 1: {11, 0}}") == [[1, 4], [0, 11]]


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("a.txt", "{0: [1], 1: [12]}", "there are 12"),
        ("a.txt", "{0: [1], 1: [1]}", "two clients"),
        ("a.txt", "{0: [1]}", "set clients=1"),
        ("a.txt", "__import__('os')", "no list of clients"),
        ("a.json", "[]", "no list of clients"),
        ("a.json", leaf("user_data", ["img_1_label_2.png"], []), "labels differ"),
        ("a.json", leaf("user_data", ["cat.png"], []), "img_INDEX"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path: Path, name: str, text: str, hint: str) -> None:
    with pytest.raises(PartitionError, match=hint):
        divided(tmp_path / name, text)
    with pytest.raises(PartitionError, match="cannot be read"):
        given(TARGETS, 2, RNG, str(tmp_path / "absent.txt"))


def picture(path: Path, shade: int, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 255 - shade, 0)).save(path)


def test_a_domain_of_pacs_is_left_out(tmp_path: Path) -> None:
    for domain in DOMAINS:
        for label, name in enumerate(("dog", "house")):
            for number in range(10):
                picture(tmp_path / "PACS" / domain / name / f"{number}.png", 100 * label + number)
    fed = fedflat.load_federation("pacs(leave_out='photo', per_domain=2, size=16)", root=tmp_path)
    assert len(fed) == 6 and fed.names == [f"{d}_{i}" for d in ("art_painting", "cartoon", "sketch") for i in (0, 1)]
    assert fed.sizes.sum() == 54 and len(fed.test or ()) == 6 and len(fed.tests["unseen"]) == 20
    e = fedflat.Experiment(data="pacs(leave_out='photo', size=16)", model="mlp(hidden=8)", rounds=3, backend="serial")
    run = fedflat.run(e.replace(lr=0.1, local_epochs=3, batch_size=6), root=tmp_path)
    assert run.metrics[-1]["unseen_accuracy"] > 0.9 and run.experiment.clients == 3
    with pytest.raises(DataError, match="not here"):
        fedflat.load_federation("pacs", root=tmp_path / "elsewhere")


def test_landmarks_by_photographer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = tmp_path / "landmarks"
    for number in range(6):
        picture(home / "images" / f"id{number}.jpg", 40 * number, (50 + number, 40))
    rows = ["user_id,image_id,class", "7,id0,0", "7,id1,2", "3,id2,1", "3,gone,1", "3,id3,0"]
    (home / "mini_gld_train_split.csv").write_text("\n".join(rows))
    (home / "mini_gld_test.csv").write_text("image_id,class\nid4,2\nid5,0\n")
    fed = fedflat.load_federation("landmarks(pixels=32)", root=tmp_path)
    assert fed.names == ["7", "3"] and fed.sizes.tolist() == [2, 2] and fed.classes == 3 and len(fed.test or ()) == 2
    assert "1 of 7 images" in caplog.text
    e = fedflat.Experiment(data="landmarks(pixels=32)", model="mobilenetv2", rounds=1, local_epochs=1, backend="serial")
    assert fedflat.run(e, root=tmp_path).metrics[-1]["clients"] == 2
    (home / "mini_gld_test.csv").write_text("image,class\nid4,2\n")
    with pytest.raises(DataError, match="image_id and class"):
        fedflat.load_federation("landmarks", root=tmp_path)


def test_weights_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = build_model("cnn64", (3, 32, 32), 10)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        model = build_model("cnn64", (3, 32, 32), 10)
        load_weights(model, tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    other = build_model("cnn64", (3, 32, 32), 100)
    head = other.state_dict()["head.classifier.weight"].clone()
    load_weights(other, tmp_path / "w.safetensors")
    assert "10 outputs there and 100 here: it starts anew" in caplog.text
    assert torch.equal(other.state_dict()["head.classifier.weight"], head)
    assert torch.equal(next(other.parameters()), next(source.parameters()))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save_file(build_model("lenet5", (3, 32, 32), 10).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="does not fit the model"):
        load_weights(build_model("cnn64", (3, 32, 32), 10), tmp_path / "w.safetensors")
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")  # a pickled module could run code when it is read
    with pytest.raises(DataError, match="read safely"):
        load_weights(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(DataError, match="no such file"):
        load_weights(nn.Linear(2, 2), tmp_path / "absent.pt")


def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    model = build_model("logistic", (1, 8, 8), 10)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    e = fedflat.Experiment(data="digits", model="logistic", clients=3, rounds=1, lr=0.0, backend="serial")
    run = fedflat.run(e.replace(weights=str(tmp_path / "w.safetensors"), lr=1e-9), out=tmp_path / "run")
    assert torch.allclose(run.weights, torch.cat([p.detach().flatten() for p in model.parameters()]), atol=1e-6)
    assert len(json.loads((tmp_path / "run/environment.json").read_text())["inputs"]["weights"]) == 16


def test_a_truncated_photograph_leaves_its_client_out_of_every_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However few clients there are, so that the damaged file is among those that are looked at first."""
    home = tmp_path / "landmarks"
    for number in range(9):
        picture(home / "images" / f"p{number}.jpg", 20 * number)
    rows = [f"{'abc'[number % 3]},p{number},{number % 2}" for number in range(6)]
    (home / "mini_gld_train_split.csv").write_text("\n".join(["user_id,image_id,class", *rows]))
    (home / "mini_gld_test.csv").write_text("image_id,class\np6,0\np7,1\np8,0")
    sound = fedflat.load_federation("landmarks(pixels=16)", root=tmp_path).fingerprint()
    broken = home / "images" / "p4.jpg"
    broken.write_bytes(broken.read_bytes()[:150])
    e = fedflat.Experiment(data="landmarks(pixels=16)", model="logistic", rounds=2, batch_size=2, backend="serial")
    run = fedflat.run(e, root=tmp_path)
    assert [(row["clients"], row["left_out"]) for row in run.metrics] == [(2, 1), (2, 1)]
    assert "p4.jpg cannot be decoded" in caplog.text
    assert (
        fedflat.load_federation("landmarks(pixels=16)", root=tmp_path).fingerprint() == sound
    )  # once mended, it resumes
