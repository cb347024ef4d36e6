"""Data sets with clients of their own: counts of the published files, windows of texts, and what goes wrong."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedflat
from fedflat.data.heart import HOSPITALS, features
from fedflat.data.text import LEAF, TFF
from fedflat.errors import DataError, InputError
from fedflat.models import build_model


def test_heart_is_split_as_flamby_splits_it() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    home, fed = resources.files("fedflat.data").joinpath("heart_disease"), fedflat.load_federation("heart")
    stored = json.loads(home.joinpath("split.json").read_text())
    md5 = ("2d91a8ff", "22e96bee", "9a87f757", "4249d03c")
    for client, hospital in enumerate(HOSPITALS):
        raw = home.joinpath(f"processed.{hospital}.data").read_bytes()
        assert hashlib.md5(raw).hexdigest().startswith(md5[client])
        x, y = features(raw.decode(), hospital)
        few = np.bincount(y.astype(int), minlength=2).min() <= 2
        found, _ = selection.train_test_split(
            np.arange(len(y)), test_size=0.34, random_state=43, stratify=None if few else y
        )
        assert sorted(found.tolist()) == stored[hospital] and x.shape[1] == 13
        own, _ = fed.samples(client).batch(torch.arange(fed.size(client)))
        assert own.mean(0).abs().max() < 1e-5 and ((own.std(0) - 1).abs() < 1e-4).sum() >= 12 - 3 * (client == 2)
    assert fed.sizes.tolist() == [199, 172, 30, 85]
    assert [len(fed.client_test(i) or ()) for i in range(4)] == [104, 89, 16, 45]
    assert (
        fed.task.name == "multi_label" and sum(p.numel() for p in build_model("logistic", (13,), 1).parameters()) == 14
    )


def test_an_experiment_on_natural_clients_records_what_they_are() -> None:
    run = fedflat.run(fedflat.Experiment(data="heart", model="logistic", rounds=2, batch_size=4, lr=0.01))
    e = run.experiment
    assert (e.partition, e.clients, e.participation) == ("natural", 4, "all") and run.metrics[-1]["clients"] == 4
    assert run.task["lead"] == "accuracy" and 0.5 < run.metrics[-1]["auc"] <= 1
    for wrong in ({"partition": "iid"}, {"clients": 7}, {"local_holdout": 0.2}):
        with pytest.raises(InputError, match="heart has"):
            fedflat.run(e.replace(partition=fedflat.Experiment.partition).replace(**wrong))


def roles(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def test_windows_of_a_text_in_leafs_layout(tmp_path: Path) -> None:
    spoken = "".join(chr(ord("a") + i % 26) for i in range(300))
    lines = f"{spoken[:100]}\n{spoken[100:]}"  # a line of the file is a line said; lines are joined by blanks
    roles(tmp_path / "shakespeare/data/raw_data/by_play_and_character", {"PLAY_ROLE": lines, "SHORT": "too short"})
    fed = fedflat.load_federation("shakespeare(fraction=0.5)", root=tmp_path)
    text = lines.replace("\n", " ")
    windows = len(text) - 80
    assert len(fed) == 1 and fed.sizes.tolist() == [windows // 2] and fed.classes == len(LEAF) == 80
    x, y = fed.samples(0).batch(torch.tensor([0, 7]))
    assert x.shape == (2, 80) and "".join(LEAF[c] for c in x[1]) == text[7:87] and LEAF[y[1]] == text[87]
    test, _ = fed.test.batch(torch.tensor([0]))  # type: ignore[union-attr]
    assert "".join(LEAF[c] for c in test[0]) == text[windows // 2 + 79 :][:80]
    assert len(fed.test or ()) == windows - windows // 2 - 79
    every = fedflat.load_federation("shakespeare(fraction=0.5, every=True)", root=tmp_path)
    x, y = every.samples(0).batch(torch.tensor([3]))
    assert torch.equal(x[0, 1:], y[0, :-1])


def test_chunks_of_a_text_by_tffs_convention(tmp_path: Path) -> None:
    """pad 0, 86 characters from 1, unknown 87, begin 88, end 89; the next symbol is asked for at every position."""
    said = ["To be, or not", "to be: that", "is the question.", "Ay, the rüb"]
    home = tmp_path / "shakespeare/data/raw_data/by_play_and_character"
    roles(home, {"HAMLET_HAMLET": "\n".join(said), "HAMLET_GHOST": "Mark me."})
    fed = fedflat.load_federation("shakespeare(convention='tff', length=20, fraction=0.75)", root=tmp_path)
    assert fed.names == ["HAMLET_HAMLET"] and fed.classes == 90 and len(set(TFF)) == 86
    x, y = fed.samples(0).batch(torch.arange(fed.size(0)))
    spoken = [88, *(1 + TFF.index(letter) for letter in "\n".join(said[:3])), 89]  # 44 symbols in chunks of 21
    assert len(spoken) == 44 and x.shape == y.shape == (3, 20)
    assert x[0].tolist() == spoken[:20] and y[0].tolist() == spoken[1:21] and x[1].tolist() == spoken[21:41]
    assert x[2].tolist() == [*spoken[42:], *[0] * 18] and y[2].tolist() == [89, *[-100] * 19]  # a pad is no target
    exact = fedflat.load_federation("shakespeare(convention='tff', length=42, fraction=0.75)", root=tmp_path)
    assert exact.size(0) == 1  # the 44th symbol alone would be a chunk without a target
    heard, _ = fed.test.batch(torch.tensor([0]))  # type: ignore[union-attr]
    assert heard[0, 0] == 88 and heard[0, 10] == 87 and (heard == 87).sum() == 1  # the ü
    with pytest.raises(InputError, match="stride must stay 1"):
        fedflat.load_federation("shakespeare(convention='tff', stride=2)", root=tmp_path)


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not here"):
        fedflat.load_federation("tiny_shakespeare", root=tmp_path)
    roles(tmp_path / "tiny_shakespeare" / "by_character", {"SHORT": "to be"})
    with pytest.raises(DataError, match="no role has enough characters"):
        fedflat.load_federation("tiny_shakespeare", root=tmp_path)
    with pytest.raises(InputError, match="stride"):
        fedflat.load_federation("tiny_shakespeare(stride=0)", root=tmp_path)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("model", ["char_lstm(hidden=8, layers=1", "char_transformer(width=8, heads=2, layers=1"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+asam"])
def test_characters_are_learned(tmp_path: Path, model: str, every: bool, method: str) -> None:
    roles(tmp_path / "tiny_shakespeare" / "by_character", {"A": "to be or " * 60, "B": "not to be " * 60})
    data = f"tiny_shakespeare(length=12, least=100, stride=9, every={every})"
    e = fedflat.Experiment(
        data=data, model=f"{model}, every={every})", method=method, rounds=6, lr=0.5, backend="serial"
    )
    run = fedflat.run(e.replace(local_epochs=3, batch_size=10, clip=1.0, lr_schedule="constant"), root=tmp_path)
    first, last = run.metrics[0], run.metrics[-1]
    assert last["perplexity"] < first["perplexity"] and last["perplexity"] < 11  # of eleven characters
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"]), rel=1e-4)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "parameters"),
    [
        ("char_lstm", (80,), 80, 819_920),
        ("char_lstm(hidden=100)", (80,), 80, 133_520),
        ("char_lstm(every=True)", (80,), 90, 822_570),
        ("char_transformer", (80,), 80, 115_536),
        ("cnn_femnist", (1, 28, 28), 62, 6_603_710),
    ],
)
def test_parameter_counts(model: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert sum(p.numel() for p in build_model(model, shape, classes).parameters()) == parameters


def test_a_causal_transformer_does_not_look_ahead() -> None:
    model = build_model("char_transformer(every=True)", (10,), 5).eval()
    x = torch.randint(5, (1, 10), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 6:] = (x[0, 6:] + 1) % 5
    assert torch.equal(model(x)[:, :, :6], model(other)[:, :, :6])


def leaf(path: Path, users: dict[str, tuple[list[Any], list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(users), "num_samples": [0] * len(users), "user_data": held}))


def test_femnist_in_leafs_layout(tmp_path: Path) -> None:
    shade = lambda v: [v / 255] * 784  # noqa: E731
    home = tmp_path / "femnist" / "data"
    leaf(home / "train/all_data_0.json", {"w1": ([shade(255), shade(10)], [3, 61]), "w0": ([shade(7)], [0])})
    leaf(home / "test/all_data_0.json", {"w0": ([shade(9)], [5]), "w1": ([shade(10)], [61])})
    leaf(home / "unseen/all_data_0.json", {"w9": ([shade(1), shade(2)], [1, 2])})
    for _ in range(2):  # parsed, then from the arrays that are kept
        fed = fedflat.load_federation("femnist", root=tmp_path)
        assert fed.sizes.tolist() == [2, 1] and len(fed.test or ()) == 2 and len(fed.tests["unseen"]) == 2
        x, y = fed.samples(0).batch(torch.arange(2))
        assert x.shape == (2, 1, 28, 28) and x[:, 0, 0, 0].tolist() == [255, 10] and y.tolist() == [3, 61]
        own, label = fed.client_test(1).batch(torch.tensor([0]))  # type: ignore[union-attr]
        assert own.unique().tolist() == [9] and label.item() == 5
    assert len(fedflat.load_federation("femnist(drop_repeated=True)", root=tmp_path).test or ()) == 1
    (home / "train/all_data_0.json").write_text("{}")
    with pytest.raises(DataError, match="LEAF's layout"):
        fedflat.load_federation("femnist", root=tmp_path)
