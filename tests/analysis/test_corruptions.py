"""Corrupted images: against genuine images of CIFAR-10-C, against Pillow, and by their statistics."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedflat import InputError, analysis
from fedflat.analysis.corrupted import BLOCK, CORRUPTIONS, SEVERITIES, corrupt
from fedflat.analysis.ice import photograph, window
from fedflat.analysis.image_filters import motion, resize
from fedflat.data.preprocess import Preprocess

EXACT = [name for name, each in CORRUPTIONS.items() if each.faith == "exact"]
SAMPLE = Path(os.environ.get("FEDFLAT_DATA", "absent"))


def photographs(count: int = 4, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Smooth random images of all brightnesses."""
    draw = torch.Generator().manual_seed(3)
    coarse = torch.rand(count, channels, 6, 6, generator=draw)
    fine = nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    return (fine * 255).to(torch.uint8)


def genuine(name: str) -> tuple[Tensor, Tensor]:
    """Test image 0 of CIFAR-10 and its five published corruptions, where they are."""
    clean, sample = SAMPLE / "cifar-10-batches-bin/test_batch.bin", SAMPLE / "CIFAR-10-C-sample" / f"{name}.npy"
    if not (clean.exists() and sample.exists()):
        pytest.skip(
            "no published sample images: $FEDFLAT_DATA does not hold CIFAR-10-C-sample and cifar-10-batches-bin"
        )
    pixels = np.fromfile(clean, np.uint8, 3073)[1:].reshape(1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.from_numpy(np.load(sample)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", EXACT)
def test_exact_corruptions_are_the_published_pixels(name: str) -> None:
    image, published = genuine(name)
    for severity in SEVERITIES:
        # Row 31 of the samples was not recovered exactly.
        gap = (corrupt(image, name, severity)[0].int() - published[severity - 1].int()).abs()[:, :31]
        assert int(gap.max()) <= 2 and float((gap > 0).double().mean()) <= 0.08


@pytest.mark.parametrize(
    ("severity", "number", "row", "column"),
    [(1, 2, 24, 70), (2, 4, 4, 22), (3, 5, 22, 68), (4, 2, 16, 75), (5, 5, 45, 58)],
)
def test_frost_of_photographs_is_the_published_one_at_its_place(
    severity: int, number: int, row: int, column: int
) -> None:
    image, published = genuine("frost")
    weight, ice = CORRUPTIONS["frost"].severities[severity - 1]
    texture = photograph(SAMPLE / "CIFAR-10-C-sample/frost", number)
    made = weight * image[0].double() / 255 + ice * window(texture, image, row, column)
    gap = ((made.clamp(0, 1) * 255).int() - published[severity - 1].int()).abs()[:, :31]
    assert int(gap.max()) <= 3 and float((gap > 0).double().mean()) <= 0.05


def test_frost_of_a_users_photographs(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    with pytest.raises(InputError, match=r"has no frost1\.png or frost1\.jpg"):
        analysis.photographed_frost(tmp_path)
    for number, level in enumerate((31, 82, 133, 184, 236), start=1):
        pillow.new("RGB", (40, 50), (level,) * 3).save(tmp_path / f"frost{number}.png")
    table = {"frost": analysis.photographed_frost(tmp_path)}
    for channels, side in ((3, 32), (1, 28), (3, 64)):
        black = torch.zeros(200, channels, side, side, dtype=torch.uint8)
        made = corrupt(black, "frost", 4, table=table)
        assert made.unique().tolist() == [12, 32, 53, 73, 94]  # 0.4 of each, cut off
    (tmp_path / "frost3.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"cannot read .*frost3\.png"):
        analysis.photographed_frost(tmp_path)


def test_motion_blur_is_the_published_one_at_some_angle() -> None:
    image, published = genuine("motion_blur")
    angles = np.linspace(-45, 45, 361)
    for (radius, sigma), wanted in zip(CORRUPTIONS["motion_blur"].severities, published, strict=True):
        made = motion(image.double().expand(len(angles), -1, -1, -1), int(radius), sigma, angles)
        gap = (made - wanted).abs()[:, :, :31].amax((1, 2, 3))
        assert float(gap.min()) <= 3


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - set(EXACT) - {"frost", "impulse_noise"}))
def test_random_corruptions_change_as_much_as_the_published_ones(name: str) -> None:
    image, published = genuine(name)
    for severity in SEVERITIES:
        made = corrupt(image.expand(60, -1, -1, -1).contiguous(), name, severity, seed=1)
        change = (made.double() - image).abs().mean((1, 2, 3))
        wanted = float((published[severity - 1].double() - image[0]).abs().mean())
        # One published image is one draw: within a quarter, or within three deviations of our own draws.
        assert abs(wanted - float(change.mean())) <= max(0.25 * wanted, 3 * float(change.std()))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_zero_is_the_identity_and_others_are_not(name: str) -> None:
    images = photographs()
    assert torch.equal(corrupt(images, name, 0), images)
    for severity in (1, 5):
        assert not torch.equal(corrupt(images, name, severity), images)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 48, 64), (1, 28, 28), (1, 8, 8), (3, 9, 33)])
def test_any_size_and_grey_images(name: str, channels: int, height: int, width: int) -> None:
    images = photographs(2, channels, height, width)
    before = images.clone()
    for severity in (1, 3, 5):
        made = corrupt(images, name, severity)
        assert made.shape == images.shape and made.dtype == torch.uint8
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_draws_follow_the_seed(name: str) -> None:
    images = photographs(3)
    first, again, other = (corrupt(images, name, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    fixed = CORRUPTIONS[name].faith == "exact" or name == "jpeg_compression"
    assert torch.equal(first, other) == fixed


def test_blocks_of_images_draw_different_numbers() -> None:
    images = torch.full((BLOCK + 1, 1, 8, 8), 128, dtype=torch.uint8)
    made = corrupt(images, "gaussian_noise", 5)
    assert len(torch.unique(made.flatten(1), dim=0)) == BLOCK + 1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_the_stated_strength(severity: int) -> None:
    grey = torch.full((100, 3, 32, 32), 127, dtype=torch.uint8)
    level = 127 / 255
    values = {name: corrupt(grey, name, severity).double() / 255 for name in CORRUPTIONS if "_noise" in name}
    size = {name: CORRUPTIONS[name].severities[severity - 1][0] for name in values}
    assert float(values["gaussian_noise"].std()) == pytest.approx(size["gaussian_noise"], rel=0.02)
    assert float(values["speckle_noise"].std()) == pytest.approx(level * size["speckle_noise"], rel=0.02)
    # 5 %: at rate 250, counts 100 to 149 become levels of distance 1 instead of 1.02, as the rest is cut off.
    assert float(values["shot_noise"].var()) == pytest.approx(level / size["shot_noise"], rel=0.05)
    struck = values["impulse_noise"]
    assert float((struck != level).double().mean()) == pytest.approx(size["impulse_noise"], rel=0.05)
    assert float((struck == 1).double().mean()) == pytest.approx(size["impulse_noise"] / 2, rel=0.1)


def test_a_plain_image_has_nothing_to_blur() -> None:
    plain = torch.full((1, 3, 32, 32), 90, dtype=torch.uint8)
    for name in ("gaussian_blur", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "pixelate", "contrast"):
        assert int((corrupt(plain, name, 5).int() - 90).abs().max()) <= 1  # levels are cut off, not rounded


def test_resizing_is_pillows() -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = torch.randint(256, (1, 1, 31, 47), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for height, width in ((20, 30), (29, 44), (31, 20), (40, 60)):
        wanted = pillow.fromarray(image[0, 0].numpy()).resize((width, height), pillow.BOX)
        made = resize(image.double(), height, width)[0, 0].to(torch.uint8)
        assert torch.equal(made, torch.from_numpy(np.array(wanted)))


class Brightest(nn.Module):
    """Says which half of an image is brighter: class 0 for the upper one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        return self.weight * torch.stack([x[:, :, :half].mean((1, 2, 3)), x[:, :, half:].mean((1, 2, 3))], 1)


def test_accuracy_is_that_of_the_corrupted_images() -> None:
    images = photographs(60)
    recipe = Preprocess((0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    labels = Brightest()(recipe(images, None)).argmax(1)
    found = analysis.corruptions(Brightest(), (images, labels), severity=(1, 5), preprocess=recipe, seed=2)
    assert found.clean == 1 and set(found.accuracy) == set(CORRUPTIONS)
    made = recipe(corrupt(images, "fog", 5, seed=2), None)
    assert found.accuracy["fog"][1] == float((Brightest()(made).argmax(1) == labels).double().mean())
    assert found.mean == pytest.approx(np.mean(list(found.accuracy.values()))) and found.drop == 1 - found.mean
    assert found.accuracy["contrast"] == [1, 1]  # which half is brighter stays
    assert set(found.by_group) == {"noise", "blur", "weather", "digital"}
    same = analysis.corruptions(Brightest(), (images.double() / 255, labels), names=["fog"], preprocess=recipe, seed=2)
    assert same.accuracy["fog"] == found.accuracy["fog"][1:]


def test_published_files_are_read_where_they_are(tmp_path: Path) -> None:
    images = photographs(12)
    labels = Brightest()(images.double()).argmax(1)
    upside = images.flip(2)  # every answer is wrong from severity 3 on
    rows = torch.cat([images, images, upside, upside, upside]).permute(0, 2, 3, 1).contiguous()
    np.save(tmp_path / "fog.npy", rows.numpy())
    np.save(tmp_path / "labels.npy", labels.repeat(5).numpy())
    for some in (None, 5):
        found = analysis.corruptions(
            Brightest(),
            (images, labels),
            severity=(2, 3),
            names=["fog", "contrast"],
            published=tmp_path,
            max_samples=some,
        )
        assert found.accuracy["fog"] == [1, 0] and found.faith == {"fog": "published", "contrast": "exact"}
    with pytest.raises(InputError, match="other labels than the 12 test images"):
        analysis.corruptions(Brightest(), (images, 1 - labels), published=tmp_path)
    np.save(tmp_path / "fog.npy", rows[:-1].numpy())
    with pytest.raises(InputError, match=r"fog\.npy holds uint8 of shape \(59, 32, 32, 3\)"):
        analysis.corruptions(Brightest(), (images, labels), names=["fog"], published=tmp_path)
    (tmp_path / "fog.npy").write_bytes(b"half a")
    with pytest.raises(InputError, match=r"cannot read .*fog\.npy"):
        analysis.corruptions(Brightest(), (images, labels), names=["fog"], published=tmp_path)


def test_images_of_other_scales_are_the_same_images() -> None:
    levels = (photographs(20, 1, 8, 8) / 16).to(torch.uint8)  # 0 to 15
    labels = torch.arange(20) % 2
    one = analysis.corruptions(Brightest(), (levels, labels), preprocess=Preprocess(scale=15.0))
    other = analysis.corruptions(Brightest(), (levels * 17, labels))
    assert one.accuracy == other.accuracy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["gausian_noise"]}, "unknown corruption 'gausian_noise': did you mean 'gaussian_noise'"),
        ({"severity": 6}, "severity must be a whole number from 1 to 5, got 6"),
        ({"severity": 0}, "severity must be a whole number from 1 to 5, got 0"),
        ({"names": []}, "at least one corruption"),
        ({"x": torch.randn(4, 3, 32, 32)}, "before normalisation"),
        ({"x": torch.zeros(4, 3, 5, 32)}, "at least 8 × 8 pixels, got 3 channels of 5 × 32"),
        ({"x": torch.zeros(4, 2, 32, 32)}, "1 or 3 channels"),
        ({"x": torch.zeros(4, 20)}, r"images as uint8 of shape \(N, channels, height, width\)"),
    ],
)
def test_bad_input_is_one_clear_line(changes: dict[str, object], message: str) -> None:
    x = changes.pop("x", photographs(4))
    with pytest.raises(InputError, match=message) as raised:
        analysis.corruptions(Brightest(), (x, torch.zeros(4, dtype=torch.int64)), **changes)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
