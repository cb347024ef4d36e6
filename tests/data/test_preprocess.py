"""Each paper's constants and orders: what is padded with what, when, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedflat.core.streams import Stream, stream
from fedflat.data import Preprocess, recipe
from fedflat.errors import InputError, UnknownNameError


def _images(batch: int = 40, side: int = 32, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (batch, channels, side, side), generator=generator, dtype=torch.uint8)


def _stream(seed: int = 1) -> Stream:
    return stream(seed, "tests")


def _normalised(x: Tensor, how: Preprocess) -> Tensor:
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (how.mean, how.std))
    return (x.double() / how.scale - mean) / std


def _windows(x: Tensor, how: Preprocess) -> Tensor:
    """By the definition, one step after the other: every window of the mirrored or plain image, (2·9·9, C, H, W)."""
    both = torch.stack([x, x.flip(-1)])
    if how.black:
        padded = _normalised(torch.nn.functional.pad(both, (how.pad,) * 4), how)
    else:
        padded = torch.nn.functional.pad(_normalised(both, how), (how.pad,) * 4)
    steps = 2 * how.pad + 1
    side = x.shape[-1]
    return torch.stack(
        [padded[m, :, i : i + side, j : j + side] for m in range(2) for i in range(steps) for j in range(steps)]
    )


CONSTANTS = [
    ("paper000", "cifar10", (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    ("paper000", "cifar100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    ("paper000", "tiny_imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ("paper001", "cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ("paper001", "cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ("paper003", "cifar10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ("paper003", "cifar100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    ("paper004", "cifar10", (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    ("paper004", "cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
]


@pytest.mark.parametrize("name,data,mean,std", CONSTANTS)
def test_evaluation_normalises_only_with_the_papers_constants(
    name: str, data: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    x = _images(4)
    got = recipe(name, data)(x, None, torch.float64)
    expected = (x.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(3, 1, 1)
    assert torch.allclose(got, expected, atol=1e-6)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert recipe(name, data)(x, None).dtype == torch.float32


@pytest.mark.parametrize("name", ["paper000", "paper001", "paper003"])
def test_every_training_image_is_a_window_of_its_padded_self(name: str) -> None:
    x, how = _images(16), recipe(name, "cifar10")
    got = how(x, _stream(), torch.float64)
    for image, result in zip(x, got, strict=True):
        distance = (_windows(image, how) - result).abs().amax(dim=(1, 2, 3))
        assert distance.min() < 1e-12


def _border(x: Tensor, how: Preprocess, source: Stream) -> Tensor:
    """Rows that hold padding only: those of the images whose window reaches beyond the top (mean of the top row)."""
    return how(x, source, torch.float64)[:, :, 0, :]


def test_padding_is_the_mean_colour_in_paper_000_and_black_in_the_others() -> None:
    x = _images(200)  # no black pixel, and none of the mean colour
    zero = _border(x, recipe("paper000", "cifar10"), _stream())
    assert ((zero == 0).all(dim=(1, 2))).any()
    for name in ("paper001", "paper003"):
        how = recipe(name, "cifar10")
        black = -torch.tensor(how.mean).double() / torch.tensor(how.std).double()
        rows = _border(x, how, _stream())
        padded = ((rows - black.view(1, 3, 1)).abs() < 1e-6).all(dim=(1, 2))
        assert padded.any()
        assert not (rows == 0).all(dim=(1, 2)).any()


def test_paper_000_crops_half_of_the_images_and_the_others_all() -> None:
    x = _images(2000, side=8)
    for name, untouched in (("paper000", 0.5 + 0.5 / 81), ("paper003", 1 / 81)):
        how = recipe(name, "cifar10")
        got, plain = how(x, _stream(), torch.float64), _normalised(x, how)
        same = (got - plain).abs().amax(dim=(1, 2, 3)) < 1e-9
        mirrored = (got - plain.flip(-1)).abs().amax(dim=(1, 2, 3)) < 1e-9
        assert abs((same | mirrored).double().mean() - untouched) < 0.03
        if name == "paper000":
            assert abs(same.double().mean() - mirrored.double().mean()) < 0.05


def test_all_offsets_occur_about_equally_often() -> None:
    side, how = 4, Preprocess(pad=1, black=False, scale=1.0)
    x = torch.arange(1, side * side + 1, dtype=torch.uint8).view(1, 1, side, side).repeat(9000, 1, 1, 1)
    corners = how(x, _stream())[:, 0, 1, 1]  # the pixel there names the window
    values, counts = corners.unique(return_counts=True)
    assert len(values) == 9
    assert ((counts - 1000).abs() < 150).all()


def test_draws_come_from_the_given_stream_alone() -> None:
    x, how = _images(), recipe("paper000", "cifar10")
    before = torch.get_rng_state()
    a, b, c = how(x, _stream(5)), how(x, _stream(5)), how(x, _stream(6))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


def test_memory_layout_does_not_change_the_numbers() -> None:
    x, how = _images(), recipe("paper000", "cifar10")
    assert torch.equal(how(x, _stream()), how(x.contiguous(memory_format=torch.channels_last), _stream()))


def test_the_raw_batch_is_left_alone() -> None:
    x = _images().contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    recipe("paper003", "cifar10")(x, _stream())
    assert torch.equal(x, kept)


def test_custom_data_pass_unscaled() -> None:
    how = Preprocess()
    assert torch.equal(how(torch.ones(2, 3), None), torch.ones(2, 3))
    assert how(torch.ones(2, 3), _stream(), torch.float64).dtype == torch.float64
    tokens = torch.arange(6).view(2, 3)
    assert how(tokens, _stream()) is tokens
    assert torch.equal(how(torch.full((2, 3), 255, dtype=torch.uint8), None), torch.ones(2, 3))


@pytest.mark.parametrize("data", ["digits", "mnist", "fashion_mnist", "npz", "folder"])
def test_auto_is_plain_normalisation_beyond_the_papers_data(data: str) -> None:
    how = recipe("auto", data)
    x = _images(6, 8, 1)
    assert torch.equal(how(x, _stream()), how(x, None))
    assert recipe("none", data) == how


def test_auto_is_paper_000_and_none_its_constants_alone() -> None:
    assert recipe("auto", "cifar100") == recipe("paper000", "cifar100")
    none = recipe("none", "cifar100")
    assert (none.flip, none.pad) == (0, 0)
    assert none.mean == recipe("auto", "cifar100").mean


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'paper003'"):
        recipe("papr003", "cifar10")
    with pytest.raises(InputError, match="cifar10, cifar100"):
        recipe("paper003", "digits")
    with pytest.raises(InputError, match="3 channel means"):
        recipe("auto", "cifar10")(_images(2, 8, 2), None)
    with pytest.raises(InputError, match="3 channel means"):
        recipe("auto", "cifar10")(torch.zeros(2, 8, dtype=torch.uint8), None)


def test_empty_and_single_batches() -> None:
    how = recipe("paper000", "cifar10")
    assert how(_images(1), _stream()).shape == (1, 3, 32, 32)
    assert how(_images(0), _stream()).shape == (0, 3, 32, 32)
