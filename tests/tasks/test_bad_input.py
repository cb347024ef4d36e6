"""What users of tasks get wrong: one clear line each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import fedflat
from fedflat.cli import main
from fedflat.errors import DataError, InputError, RunError, UnknownNameError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr-schedule", "cosin"], "unknown learning-rate schedule 'cosin': did you mean 'cosine'?"),
        (["--lr-schedule", "poly(horizon='week')"], "horizon takes 'run' or 'round' or 'feddrive', not 'week'"),
        (["--lr-schedule", "poly(power=-1)"], "poly: power must be 0 or more, not -1"),
        (["--loss", "ohme"], "unknown loss 'ohme': did you mean 'ohem'?"),
        (["--weights", "nowhere.safetensors"], "no such file of weights: nowhere.safetensors"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--data", "digits", "--model", "logistic", "--rounds", "1", *words]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_a_scene_that_does_not_exist() -> None:
    with pytest.raises(InputError, match="scene takes 'dusk' or 'carpark', not 'night'"):
        fedflat.load_federation("camvid(scene='night')")


def test_a_corruption_that_does_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="unknown corruption 'foggy': did you mean 'fog'"):
        fedflat.analysis.corrupt(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "foggy", 1)


def test_labels_beyond_the_classes() -> None:
    x = torch.zeros(6, 4)
    good, bad = TensorDataset(x, torch.arange(6) % 3), TensorDataset(x, torch.arange(6))
    e = fedflat.Experiment(model="logistic", rounds=1, participation="all", backend="serial")
    with pytest.raises(InputError, match="client 1 has label 3, but the model has 3 outputs"):
        fedflat.run(e, federation=fedflat.Federation([good, bad], classes=3))
    late = [good] * 9 + [bad]  # before the first round only the first few clients are looked at
    with pytest.raises(RunError, match=r"client 9.*Target \d is out of bounds"):
        fedflat.run(e, federation=fedflat.Federation(late, classes=3))


def test_scores_that_do_not_fit_the_labels(tmp_path: Path) -> None:
    folder = tmp_path / "tiny_shakespeare" / "by_character"
    folder.mkdir(parents=True)
    (folder / "HAMLET.txt").write_text("to be or not " * 99)
    e = fedflat.Experiment(data="tiny_shakespeare(every=True)", model="char_lstm(hidden=4)", rounds=1)
    with pytest.raises(InputError, match=r"scores \(7,\) for the labels \(80,\) of a sample; .* need every=True"):
        fedflat.run(e, root=tmp_path)
    images, masks = torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int64)
    fed = fedflat.Federation([(images, masks)], classes=2, task="segmentation")
    with pytest.raises(InputError, match=r"scores \(2,\) for the labels \(8, 8\).*every pixel, such as bisenetv2"):
        fedflat.run(fedflat.Experiment(model="logistic", rounds=1), federation=fed)


def test_texts_shorter_than_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "shakespeare" / "data" / "raw_data" / "by_play_and_character"
    folder.mkdir(parents=True)
    for name, words in (("PLAY_LONG", 60), ("PLAY_SHORT", 1)):
        (folder / f"{name}.txt").write_text("to be or not " * words)
    fed = fedflat.load_federation("shakespeare", root=tmp_path)
    assert len(fed) == 1 and "1 of 2 roles are left out: too short for training and test windows of 80" in caplog.text
    (folder / "PLAY_LONG.txt").unlink()
    with pytest.raises(DataError, match="no role has enough characters"):
        fedflat.load_federation("shakespeare", root=tmp_path)


def test_where_the_files_of_natural_clients_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "CamVid").mkdir()
    assert main(["data", "camvid", "--data-root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "CamVid")
    assert main(["data", "pacs", "--data-root", str(tmp_path)]) == 2
    assert f"pacs is not here: it is read from {tmp_path / 'PACS'}" in capsys.readouterr().err
    assert main(["data", "heart", "--show", "--out", str(tmp_path / "heart.png")]) == 0
    assert "heart, natural: 4 clients, 486 samples, 2 classes" in capsys.readouterr().out
