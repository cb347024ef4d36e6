"""Street scenes by client, with lists in FedDrive's form: CamVid, Cityscapes and IDDA. One reader serves all three."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedflat.core.samples import IGNORED
from fedflat.data.federation import Federation
from fedflat.data.image_files import CACHE, Cache, ImageFiles
from fedflat.data.joint import JointPreprocess
from fedflat.data.leaf_json import read_json
from fedflat.data.sources import data_root
from fedflat.errors import DataError, InputError

Kind = Literal["uniform", "heterogeneous", "class_imbalance"]
Users = dict[str, tuple[list[str], list[str]]]
CAMVID = (
    "Sky",
    "Building",
    "Pole",
    "Road",
    "Pavement",
    "Tree",
    "SignSymbol",
    "Fence",
    "Car",
    "Pedestrian",
    "Bicyclist",
)
CITYSCAPES = (
    *(
        "road",
        "sidewalk",
        "building",
        "wall",
        "fence",
        "pole",
        "traffic light",
        "traffic sign",
        "vegetation",
        "terrain",
    ),
    *("sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
CITYSCAPES_RAW = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
IDDA = (*CITYSCAPES[:14], "motorcycle", "bicycle")
IDDA_RAW = (255, 2, 4, 255, 11, 5, 0, 0, 1, 8, 13, 3, 7, 6, 255, 255, 15, 14, 12, 9, 10)


@dataclass(frozen=True)
class Place:
    """Where images and masks lie, what the values of a mask mean, and how images are changed."""

    name: str
    images: Path
    masks: Path
    classes: tuple[str, ...]
    table: np.ndarray
    size: tuple[int, int]
    preprocess: JointPreprocess
    cache: int
    domain: Callable[[str], str]


def table_of(raw: Sequence[int]) -> np.ndarray:
    """The class of each value 0 … 255. raw: the class of the values 0, 1, …; 255 and all other values are ignored."""
    table = np.full(256, IGNORED, dtype=np.int64)
    for value, label in enumerate(raw):
        table[value] = IGNORED if label == 255 else label
    return table


def read_lists(folder: Path) -> Users:
    """{user: (images, masks)} of all JSON files of a folder, in the order of the files' numbers and of the lists."""
    files = sorted(folder.glob("*.json"), key=lambda file: ([int(n) for n in re.findall(r"\d+", file.stem)], file.name))
    if not files:
        raise DataError(f"{folder} holds no list of clients (*.json in FedDrive's form)")
    users: Users = {}
    for file in files:
        for user, held in read_json(file).items():
            if len(held["x"]) != len(held["y"]):
                raise DataError(f"{file}: user {user!r} has {len(held['x'])} images but {len(held['y'])} masks")
            users[user] = (held["x"], held["y"])
    return users


def _federation(lists: Path, place: Place) -> Federation:
    train, tests, cache = read_lists(lists / "train"), read_lists(lists / "test"), Cache(place.cache)
    named = sorted(tests, key=lambda user: "diff" in user)  # seen domains first: they are the common test set
    _check_files(place, [*train.values(), *tests.values()])

    def samples(held: tuple[list[str], list[str]], times: int = 1) -> ImageFiles:
        x, y = ([base / path for path in paths] for base, paths in zip((place.images, place.masks), held, strict=True))
        return ImageFiles(x, y, (times * place.size[0], times * place.size[1]), cache, place.table)

    called = {user: "unseen" if "diff" in user else "seen" for user in named}
    domains = [{place.domain(path) for path in x} for x, _ in train.values()]
    return Federation(
        {user: samples(held, place.preprocess.times) for user, held in train.items()},
        {called[user]: samples(tests[user]) for user in named},
        sizes=[len(x) for x, _ in train.values()],
        classes=len(place.classes),
        class_names=place.classes,
        preprocess=place.preprocess,
        prefetch=True,
        name=place.name,
        partition="natural",
        task="segmentation",
        domains=[own.pop() if len(own) == 1 else "" for own in domains],  # a client of several domains has none
        test_domains={called[user]: [place.domain(path) for path in tests[user][0]] for user in named},
    )


def _check_files(place: Place, lists: Sequence[tuple[list[str], list[str]]]) -> None:
    wanted = [base / path for x, y in lists for base, paths in ((place.images, x), (place.masks, y)) for path in paths]
    missing = [path for path in wanted if not path.exists()]
    if missing:
        raise DataError(
            f"{place.name}: {len(missing)} of {len(wanted)} files of the lists are missing, first {missing[0]}"
        )


def _sized(name: str, height: int, width: int) -> tuple[int, int]:
    if height < 32 or width < 32:
        raise InputError(f"{name}: height and width must be 32 or more, not {height} and {width}")
    return height, width


def _change(name: str, scales: tuple[float, ...], jitter: float, times: int = 1) -> JointPreprocess:
    """What happens to the images of training; all are mirrored with probability one half."""
    if len(scales) != 2 or not 0 < scales[0] <= scales[1]:
        raise InputError(f"{name}: scales takes the smallest and the largest factor, such as (0.5, 1.5), not {scales}")
    if not 0 <= jitter < 1:
        raise InputError(f"{name}: jitter must lie in [0, 1), not {jitter}")
    return JointPreprocess((0.5,), (0.5,), flip=0.5, scales=(scales[0], scales[1]), jitter=jitter, times=times)


def _sequence(path: str) -> str:
    """CamVid's name of an image begins with its sequence."""
    return Path(path).name.partition("_")[0]


def _city(path: str) -> str:
    """Cityscapes has a folder per city."""
    return Path(path).parent.name


def _scene(path: str) -> str:
    """IDDA's first folder names town, weather and vehicle."""
    return Path(path).parts[0]


def camvid(
    root: Path | None,
    scene: Literal["dusk", "carpark"] = "dusk",
    kind: Kind = "heterogeneous",
    height: int = 96,
    width: int = 128,
    scales: tuple[float, ...] = (1.0, 1.0),
    jitter: float = 0.0,
    cache: int = CACHE,
) -> Federation:
    """CamVid (Brostow et al., 2009) by sequence: 11 classes, seen and unseen test sequences, lists as FedDrive's.

    Read from CamVid/. scene: dusk (unseen: the sequence at dusk) or carpark (unseen: the car park). kind: one sequence
    per client (heterogeneous) or the same images dealt out anew (uniform). height, width: of the images. scales,
    jitter: see `JointPreprocess`; half of the images are mirrored. cache: bytes of decoded images to keep.
    """
    home = data_root(root) / "CamVid"
    change, size = _change("camvid", scales, jitter), _sized("camvid", height, width)
    place = Place("camvid", home, home, CAMVID, table_of(range(11)), size, change, cache, _sequence)
    return _federation(home / "clients" / scene / kind, place)


def cityscapes(
    root: Path | None,
    kind: Kind = "heterogeneous",
    height: int = 512,
    width: int = 1024,
    scales: tuple[float, ...] = (0.5, 1.5),
    jitter: float = 0.4,
    cache: int = CACHE,
) -> Federation:
    """Cityscapes (Cordts et al., 2016) with FedDrive's lists: 19 classes, one city per client or all mixed.

    Images from cityscapes/leftImg8bit and cityscapes/gtFine (…_labelIds.png), lists from FedDrive/data/cityscapes.
    kind: heterogeneous, uniform or class_imbalance. height, width: of test images, and of training crops of images
    twice as high and wide, 1024×2048 as published. scales, jitter: see `JointPreprocess`; FedDrive's by default. Half
    of the images are mirrored; FedDrive also doubles a client's set with mirrored copies, and tests on 1024×2048.
    cache: bytes of decoded images to keep.
    """
    base = data_root(root)
    raw = np.full(34, 255)
    raw[list(CITYSCAPES_RAW)] = np.arange(19)
    change = _change("cityscapes", scales, jitter, times=2)
    home, size = base / "cityscapes", _sized("cityscapes", height, width)
    masks, table = home / "gtFine", table_of(raw.tolist())
    place = Place("cityscapes", home / "leftImg8bit", masks, CITYSCAPES, table, size, change, cache, _city)
    return _federation(base / "FedDrive" / "data" / "cityscapes" / "data" / kind, place)


def idda(
    root: Path | None,
    setting: Literal["country", "rainy", "bus"] = "country",
    kind: Kind = "heterogeneous",
    height: int = 512,
    width: int = 928,
    scales: tuple[float, ...] = (0.5, 2.0),
    jitter: float = 0.0,
    cache: int = CACHE,
) -> Federation:
    """IDDA (Alberti et al., 2020) with FedDrive's lists: 16 classes, test sets of seen and of unseen domains.

    Images from IDDA/ (T01_CN_A/RGB/…, T01_CN_A/Semantic/…), lists from FedDrive/data/idda. setting: what the unseen
    domains are. kind: heterogeneous (one domain per client), uniform or class_imbalance. height, width: of
    test images, and of training crops of images twice as high and wide, 1024×1856 as in FedDrive. scales, jitter: see
    `JointPreprocess`; FedDrive's by default. FedDrive scores test images at 1024×1856, enlarging what the network says
    of 512×928. cache: bytes of decoded images to keep.
    """
    base = data_root(root)
    change = _change("idda", scales, jitter, times=2)
    home, size = base / "IDDA", _sized("idda", height, width)
    place = Place("idda", home, home, IDDA, table_of(IDDA_RAW), size, change, cache, _scene)
    return _federation(base / "FedDrive" / "data" / "idda" / "data" / kind / setting, place)
