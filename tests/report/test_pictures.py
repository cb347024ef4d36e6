"""Pictures of a segmentation run in its folder and in the report, and PNG files that other programs can read."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat.errors import CheckpointError
from fedflat.report.html import report
from fedflat.report.page.picture_section import palette
from fedflat.report.png import png
from fedflat.report.terminal import result_rows
from fedflat.runs.files import read_tensors
from fedflat.runs.records import record_of
from fedflat.tasks import TASKS, Task

Image = pytest.importorskip("PIL.Image")


class Centre(type(TASKS["segmentation"])):  # type: ignore[misc]
    """Segmentation whose report shows the sample in the middle."""

    name = "centre"

    def shown(self, count: int) -> list[int]:
        return [count // 2]


def run(out: Path, method: str = "fedavg", task: str | Task = "segmentation") -> fedflat.Run:
    """Bright pixels are class 1; the first row has no label."""
    x = torch.randint(256, (12, 3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = (x[:, 0] > 127).long()
    y[:, 0] = -100
    tests = {"seen": (x[:7], y[:7]), "unseen": (x[7:], y[7:])}
    fed = fedflat.Federation([(x, y)], tests, classes=2, class_names=["dark", "bright <b>"], task=task)
    torch.manual_seed(0)
    e = fedflat.Experiment(method=method, rounds=2, lr=0.5, batch_size=4, backend="serial")
    return fedflat.run(e, federation=fed, model=nn.Conv2d(3, 2, 1), out=out)


def test_a_run_keeps_some_images_with_prediction_and_truth(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    kept = read_tensors(tmp_path / "run" / "pictures.safetensors")
    assert {name: tuple(t.shape) for name, t in kept.items()} == {
        f"{test}/{kind}": (3, *shape)
        for test in ("test", "unseen")
        for kind, shape in (("image", (3, 8, 12)), ("prediction", (8, 12)), ("truth", (8, 12)))
    }
    scores = done.model(kept["test/image"].float() / 255)
    assert kept["test/prediction"].equal(scores.argmax(1).to(torch.int16))
    assert (kept["unseen/truth"][:, 0] == -100).all() and (kept["unseen/truth"][:, 1:] >= 0).all()


def test_the_report_shows_them_once_per_method(tmp_path: Path) -> None:
    runs = [run(tmp_path / method, method) for method in ("fedavg", "fedsam")]
    page = report(runs, tmp_path / "page.html").read_text()
    links = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="([^"]*)"', page)
    assert len(links) == 6 * (2 + 2)  # samples × (image, truth, predictions)
    assert sum("prediction of" in text for _, text in links) == 12 and "bright &lt;b&gt;" in page
    truth = next(content for content, text in links if text.startswith("truth: unseen"))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(truth))).convert("RGB"))
    assert shown.shape == (8, 12, 3) and (shown[0] == 0).all()
    assert {tuple(colour) for colour in shown[1:].reshape(-1, 3).tolist()} == set(palette(2))
    path = tmp_path / "fedavg" / "pictures.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        report([tmp_path / "fedavg"], tmp_path / "page.html")


def test_the_task_chooses_what_is_shown(tmp_path: Path) -> None:
    run(tmp_path / "run", task=Centre())
    assert len(read_tensors(tmp_path / "run" / "pictures.safetensors")["test/image"]) == 1
    e = fedflat.Experiment(data="digits", model="logistic", clients=3, rounds=1, backend="serial")
    fedflat.run(e, out=tmp_path / "digits")
    assert not (tmp_path / "digits" / "pictures.safetensors").exists()


def test_pillow_reads_what_is_written() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(png(pixels)))) == pixels).all()
    assert (np.asarray(Image.open(io.BytesIO(png(pixels[..., 0])))) == pixels[..., 0]).all()
    few = pixels[..., 0] % 3
    colours = palette(3)
    found = np.asarray(Image.open(io.BytesIO(png(few, colours))).convert("RGB"))
    assert (found == np.array(colours)[few]).all() and len(set(palette(40))) == 40


def test_metrics_are_written_as_people_write_them(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    page = report([done], tmp_path / "page.html").read_text()
    assert "mIoU on the common test set" in page and "mIoU on the unseen test set" in page and "mIoU and loss" in page
    assert "unseen mIoU" in page and not re.search(r"\bMiou\b|\bmiou\b", re.sub(r'"miou":', "", page))
    assert "Class by class" in page and "Unseen IoU" in page and ">bright &lt;b&gt;<" in page
    rows = dict(result_rows(record_of(tmp_path / "run")))
    assert {"final mIoU", "final unseen mIoU", "final accuracy"} <= rows.keys()
