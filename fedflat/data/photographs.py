"""Photographs and drawings by client: PACS, where one domain never trains, and Google Landmarks by photographer."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Literal

import torch

from fedflat.data.federation import Federation
from fedflat.data.image_files import CACHE, Cache, ImageFiles, read_square
from fedflat.data.images import SUFFIXES
from fedflat.data.joint import JointPreprocess
from fedflat.data.resized_crop import ResizedCrop, stored_side
from fedflat.data.sources import data_root
from fedflat.errors import DataError, InputError

log = logging.getLogger(__name__)
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
LISTS = {  # size → names of the training and test lists, the publishers' first
    "23k": (
        ("mini_gld_train_split.csv", "mini_gld_test.csv"),
        ("gld23k_user_dict_train.csv", "gld23k_user_dict_test.csv"),
    ),
    "160k": (("federated_train.csv", "test.csv"), ("gld160k_user_dict_train.csv", "gld160k_user_dict_test.csv")),
}


def pacs(
    root: Path | None,
    leave_out: Literal["art_painting", "cartoon", "photo", "sketch"] = "sketch",
    per_domain: int = 1,
    size: int = 64,
    cache: int = CACHE,
) -> Federation:
    """PACS (Li et al., 2017): seven classes in photos, art, cartoons and sketches; one domain never trains.

    Read from PACS/DOMAIN/CLASS/*. leave_out: the domain that is the test set "unseen". per_domain: clients that share a
    domain; every per_domain-th image is theirs. Every tenth image of the other domains is the common test set. size:
    images are resized to size×size; half of them are mirrored in training. cache: bytes of decoded images to keep.
    """
    home = data_root(root) / "PACS"
    if per_domain < 1 or size < 8:
        raise InputError(f"pacs: per_domain must be 1 or more and size 8 or more, not {per_domain} and {size}")
    classes = sorted(entry.name for entry in (home / leave_out).glob("*") if entry.is_dir())
    if not classes:
        raise DataError(f"data set pacs is not here: {home / leave_out} has no folder per class; see --data-root")
    kept = Cache(cache)

    def samples(files: list[tuple[Path, int]]) -> ImageFiles:
        return ImageFiles([path for path, _ in files], torch.tensor([label for _, label in files]), (size, size), kept)

    train: dict[str, ImageFiles] = {}
    seen: list[tuple[Path, int]] = []
    for domain in DOMAINS:
        if domain != leave_out:
            files = _labelled(home / domain, classes)
            seen += files[9::10]
            rest = [file for place, file in enumerate(files) if place % 10 != 9]
            train |= {f"{domain}_{part}": samples(rest[part::per_domain]) for part in range(per_domain)}
    return Federation(
        train,
        {"seen": samples(seen), "unseen": samples(_labelled(home / leave_out, classes))},
        sizes=[len(each) for each in train.values()],
        classes=len(classes),
        class_names=classes,
        preprocess=JointPreprocess((0.5,), (0.5,), flip=0.5),
        prefetch=True,
        name="pacs",
        partition="natural",
    )


def _labelled(domain: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """All images of a domain with their labels, in the order of their names within the classes."""
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((domain / name).glob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise DataError(f"{domain} holds no image in the folders {', '.join(classes)}")
    return files


def landmarks(
    root: Path | None,
    size: Literal["23k", "160k"] = "23k",
    pixels: int = 224,
    area: tuple[float, ...] = (0.08, 1.0),
    cache: int = CACHE,
) -> Federation:
    """Google Landmarks by photographer (Hsu et al., 2020): 233 clients and 203 classes, or 1,262 and 2,028.

    Lists from landmarks/*.csv (columns user_id, image_id, class), images from landmarks/images/ID.jpg; images that are
    not there are left out and counted. size: which of the two sets. pixels: side of the images. area: training crops a
    part of each image with a share of its area between these two, and mirrors half of them; otherwise the centre is
    taken. cache: bytes of decoded images to keep.
    """
    home = data_root(root) / "landmarks"
    pair = next((names for names in LISTS[size] if (home / names[0]).exists()), None)
    if pair is None:
        raise DataError(f"data set landmarks is not here: {home} holds no {LISTS[size][0][0]}; see --data-root")
    train, test = _rows(home / pair[0], "user_id"), _rows(home / pair[1])
    kept, side, found = Cache(cache), stored_side(pixels), dict[str, list[tuple[Path, int]]]()
    missing = 0
    for user, image, label in [*train, *(("", image, label) for _, image, label in test)]:
        path = home / "images" / f"{image}.jpg"
        if path.exists():
            found.setdefault(user, []).append((path, label))
        else:
            missing += 1
    if missing:
        log.warning(
            "landmarks: %d of %d images are not in %s: left out", missing, len(train) + len(test), home / "images"
        )
    tests = found.pop("", [])
    if not found or not tests:
        raise DataError(f"landmarks: {home / 'images'} holds none of the listed images")

    def samples(files: list[tuple[Path, int]]) -> ImageFiles:
        labels = torch.tensor([label for _, label in files])
        return ImageFiles([path for path, _ in files], labels, (side, side), kept, read=read_square)

    return Federation(
        {user: samples(files) for user, files in found.items()},
        samples(tests),
        sizes=[len(files) for files in found.values()],
        classes=1 + max(label for _, _, label in (*train, *test)),
        preprocess=ResizedCrop((0.5,), (0.5,), flip=0.5, area=(area[0], area[-1])),
        prefetch=True,
        name="landmarks",
        partition="natural",
    )


def _rows(path: Path, user: str = "") -> list[tuple[str, str, int]]:
    """(user, image, class) of a list; without a column of users, the user is empty."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [(row[user] if user else "", row["image_id"], int(row["class"])) for row in rows]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} needs the columns {user and 'user_id, '}image_id and class ({error!r})") from None
