"""FedDrive's published lists: users, images and domains as counted in its files; every path finds its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_helpers import laid_out

import fedflat
from fedflat.data.segmentation import _city, _scene, read_lists
from fedflat.errors import DataError

Image = pytest.importorskip("PIL.Image")
SETTINGS = {"country": (90, 840, 14, 1080), "rainy": (69, 2100, 35, 828), "bus": (83, 1260, 21, 996)}
"""Training users of 48 images each; unseen test images and their domains, of 60 images each; seen test images."""


@pytest.fixture(scope="module")
def lists() -> Path:
    return laid_out("feddrive", "FedDrive/data") / "FedDrive" / "data"


@pytest.mark.parametrize(
    ("kind", "users", "images", "most", "domains"),
    [
        ("uniform", 146, 2975, 40, (5, 17)),
        ("heterogeneous", 144, 2904, 45, (1, 1)),
        ("class_imbalance", 142, 2970, 40, (1, 7)),
    ],
)
def test_lists_of_cityscapes(
    lists: Path, kind: str, users: int, images: int, most: int, domains: tuple[int, int]
) -> None:
    folder = lists / "cityscapes" / "data" / kind
    train, test = read_lists(folder / "train"), read_lists(folder / "test")
    sizes = [len(x) for x, _ in train.values()]
    cities = [{_city(path) for path in x} for x, _ in train.values()]
    assert (len(train), sum(sizes), min(sizes), max(sizes)) == (users, images, 10, most)
    assert (min(map(len, cities)), max(map(len, cities))) == domains and len(set().union(*cities)) == 18
    assert [len(x) for x, _ in test.values()] == [500]
    assert {_city(path) for path in next(iter(test.values()))[0]} == {"frankfurt", "munster", "lindau"}
    _disjoint([x for x, _ in (*train.values(), *test.values())])


@pytest.mark.parametrize("kind", ["uniform", "heterogeneous", "class_imbalance"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_lists_of_idda(lists: Path, setting: str, kind: str) -> None:
    folder = lists / "idda" / "data" / kind / setting
    train, test = read_lists(folder / "train"), read_lists(folder / "test")
    users, unseen, domains, seen = SETTINGS[setting]
    assert len(train) == users and {len(x) for x, _ in train.values()} == {48}
    other, same = (test[f"test_user_{which}_domain"][0] for which in ("diff", "same"))
    counts = np.unique([_scene(path) for path in other], return_counts=True)[1]
    assert (len(other), len(counts), set(counts), len(same)) == (unseen, domains, {60}, seen)
    held = {_scene(path) for x, _ in train.values() for path in x}
    assert held == {_scene(path) for path in same} and held.isdisjoint(_scene(path) for path in other)
    if kind == "heterogeneous":
        assert all(len({_scene(path) for path in x}) == 1 for x, _ in train.values())
    _disjoint([x for x, _ in (*train.values(), *test.values())])


def _disjoint(held: list[list[str]]) -> None:
    every = [path for paths in held for path in paths]
    assert len(set(every)) == len(every)


def test_every_path_of_a_list_finds_its_place(lists: Path, tmp_path: Path) -> None:
    """A tree of empty files, but for one image, in the publisher's layout."""
    (tmp_path / "FedDrive").mkdir()
    (tmp_path / "FedDrive" / "data").symlink_to(lists)
    home = tmp_path / "IDDA"
    folder = lists / "idda" / "data" / "heterogeneous" / "rainy"
    for x, y in (*read_lists(folder / "train").values(), *read_lists(folder / "test").values()):
        for path in (*x, *y):
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).touch()
    fed = fedflat.load_federation("idda(setting='rainy', height=32, width=32)", root=tmp_path)
    assert len(fed) == 69 and fed.classes == 16 and len(fed.test or ()) == 828 and len(fed.tests["unseen"]) == 2100
    assert all(fed.domains) and len(fed.domains_of("unseen")) == 35 and set(fed.domains_of("")) == set(fed.domains)
    gone = home / read_lists(folder / "train")[fed.names[3]][0][5]  # type: ignore[index]
    gone.unlink()
    with pytest.raises(DataError, match=f"idda: 1 of 12480 files of the lists are missing, first .*{gone.name}"):
        fedflat.load_federation("idda(setting='rainy')", root=tmp_path)
