"""Photographs at 224 pixels: ImageNet-200's draw, the random resized crop, and the two presets end to end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedflat
from fedflat.core import streams
from fedflat.data.image_files import CACHE, Cache, ImageFiles, read_square
from fedflat.data.imagenet import drawn_classes
from fedflat.data.recipes import recipe
from fedflat.data.resized_crop import ResizedCrop, stored_side
from fedflat.errors import DataError, InputError

Image = pytest.importorskip("PIL.Image")


def photograph(path: Path, label: int, number: int) -> None:
    """A JPEG of its own size and shade; its class is its colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((40 + 3 * number, 50, 3), 30, np.uint8)
    pixels[..., label % 3] = 180 + number
    Image.fromarray(pixels).save(path, quality=90)


def imagenet(root: Path, classes: int = 3, images: int = 9) -> Path:
    home = root / "imagenet"
    for label, name in enumerate(drawn_classes()[:classes]):
        for number in range(images):
            photograph(home / "train" / name / f"{name}_{number}.JPEG", label, number)
        for number in range(2):
            photograph(home / "val" / name / f"ILSVRC2012_val_{number:08d}.JPEG", label, number)
    return home


def test_the_classes_are_those_of_the_generator_that_the_authors_used() -> None:
    """Class k of 1000 sorted names is drawn where its rank is drawn: the two orders are one."""
    names, ranks = drawn_classes(), np.random.RandomState(1993).choice(1000, 200, replace=False)
    assert names[:3] == ["n01729322", "n01514668", "n04550184"] and ranks[:5].tolist() == [54, 7, 894, 512, 126]
    assert np.argsort(names).tolist() == np.argsort(ranks).tolist() and len(set(names)) == 200


def test_the_list_of_images_is_drawn_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = imagenet(tmp_path)
    data = "imagenet200(classes=3, images=6, pixels=28)"
    first = fedflat.load_federation(data, "iid", clients=2, root=tmp_path)
    listed = home / "imagenet200_3x6.txt"
    lines = listed.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 18 and first.sizes.sum() == 18 and len(first.test or ()) == 6
    assert first.counts().sum(axis=0).tolist() == [6, 6, 6] and first.input_shape == (3, 28, 28)
    assert "18 training images were drawn" in caplog.text
    photograph(home / "train" / drawn_classes()[0] / "a_later_one.JPEG", 0, 0)
    assert fedflat.load_federation(data, "iid", clients=2, root=tmp_path).fingerprint() == first.fingerprint()
    (home / lines[0]).unlink()
    with pytest.raises(DataError, match="1 of 18 images are missing, first"):
        fedflat.load_federation(data, root=tmp_path)
    with pytest.raises(DataError, match=r"holds \d images, fewer than images=20"):
        fedflat.load_federation("imagenet200(classes=3, images=20)", root=tmp_path)
    with pytest.raises(DataError, match="197 of 200 classes have no folder"):
        fedflat.load_federation("imagenet200", root=tmp_path)
    with pytest.raises(InputError, match="classes must be 1 … 200"):
        fedflat.load_federation("imagenet200(classes=300)", root=tmp_path)


def test_the_preset_of_imagenet_200_runs(tmp_path: Path) -> None:
    imagenet(tmp_path)
    e = fedflat.preset("s001_in200", method="fedalign", data="imagenet200(classes=3, images=9, pixels=32)", seed=1)
    e = e.replace(clients=2, rounds=1, local_epochs=1, batch_size=4, partition="iid", backend="serial")
    run = fedflat.run(e, root=tmp_path, out=tmp_path / "run")
    assert run.metrics[-1]["clients"] == 2 and run.metrics[-1]["left_out"] == 0 and run.metrics[-1]["steps"] == 6
    assert fedflat.load_run(tmp_path / "run").model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_the_preset_of_landmarks_runs(tmp_path: Path) -> None:
    home = tmp_path / "landmarks"
    for number in range(8):
        photograph(home / "images" / f"id{number}.jpg", number, number)
    rows = [f"{number % 2},id{number},{number % 3}" for number in range(6)]
    (home / "federated_train.csv").write_text("\n".join(["user_id,image_id,class", *rows]))
    (home / "test.csv").write_text("image_id,class\nid6,0\nid7,1\n")
    e = fedflat.preset("s003_landmarks", method="fedasam+swa", data="landmarks(size='160k', pixels=32)")
    run = fedflat.run(e.replace(rounds=2, participation="all", backend="serial", local_epochs=1), root=tmp_path)
    assert run.experiment.clients == 2 and run.metrics[-1]["clients"] == 2
    assert run.model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_stored_images_give_the_wanted_crop() -> None:
    assert stored_side(224) == 256
    assert all(stored_side(pixels) * 7 // 8 == pixels for pixels in range(8, 400))


def test_the_centre_is_seen_in_evaluation() -> None:
    x = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    x[..., 1:15, 1:15] = 255
    assert ResizedCrop()(x, None).eq(1).all() and ResizedCrop()(x, None).shape == (1, 3, 14, 14)
    still = recipe("none", "imagenet200")
    changed, _ = still.pair(x, torch.zeros(1), streams.stream(0, "t"))  # type: ignore[attr-defined]
    assert still(changed, streams.stream(0, "t")).equal(still(x, None))
    with pytest.raises(InputError, match="is stated for"):
        recipe("paper003", "imagenet200")


def test_random_crops_have_the_stated_areas_and_shapes() -> None:
    """A white square on black, a quarter of the area: its share of the crop averages to what is drawn."""
    crop, count = ResizedCrop(flip=0.5), 4000
    width, height = crop._windows(count, streams.stream(0, "t"))
    area, ratio = width * height, width / height
    assert float(area.min()) >= 0.08 and float(torch.stack([width, height]).max()) <= 1
    assert float(ratio.min()) >= 3 / 4 - 1e-5 and float(ratio.max()) <= 4 / 3 + 1e-5
    assert abs(float(ratio.log().mean())) < 0.01  # wide and high crops are equally likely
    # Areas are uniform up to the largest that fits whatever the shape, 3/4; beyond it, odd shapes are drawn again.
    inside = area[area < 3 / 4]
    assert abs(float(inside.mean()) - (0.08 + 0.75) / 2) < 0.02
    x = torch.randint(256, (64, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    cropped, y = crop.pair(x, torch.arange(64), streams.stream(0, "t"))
    assert cropped.shape == (64, 3, 14, 14) and y.equal(torch.arange(64))
    whole = ResizedCrop(area=(1.0, 1.0), ratio=(1.0, 1.0))
    ramp = torch.arange(0, 256, 16, dtype=torch.uint8).expand(1, 3, 16, 16)
    seen = whole.pair(ramp, torch.zeros(1), streams.stream(0, "t"))[0][0, 0, 0].float()
    # Pixel i of 14 lies at (i + ½) · 16/14 − ½ of 16: a straight line again, between the border pixels.
    line = (16 * ((torch.arange(14) + 0.5) * 16 / 14 - 0.5)).clamp(0, 240)
    assert (seen - line).abs().max() <= 0.5 + 1e-4


def test_the_central_square_of_a_photograph_is_read(tmp_path: Path) -> None:
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[:, 90:210] = 255  # the filter looks a little beyond the square
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert (read_square(tmp_path / "wide.png", (20, 20)) == 255).all()
    Image.fromarray(np.repeat(np.repeat(pixels, 8, 0), 8, 1)).save(tmp_path / "large.jpg", quality=95)
    assert read_square(tmp_path / "large.jpg", (20, 20)).min() > 250
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "large.jpg").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.jpg cannot be decoded"):
        read_square(tmp_path / "cut.jpg", (20, 20))


def test_labels_are_known_without_decoding_and_caches_travel_empty() -> None:
    files = ImageFiles([Path("absent.jpg")] * 4, torch.tensor([0, 1, 1, 2]), (8, 8), Cache())
    fed = fedflat.Federation([files, files[torch.tensor([1, 2])]], classes=3, prefetch=True, task="classification")
    assert fed.counts().tolist() == [[1, 2, 1], [0, 2, 0]]
    cache = Cache(1000)
    cache.get("key", lambda: np.zeros(10))
    state = cache.__getstate__()
    assert state["limit"] == 1000 and not state["_kept"] and CACHE == 256 << 20 and math.isclose(cache.bytes, 80)
