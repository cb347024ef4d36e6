"""The papers' preprocessing: their constants, and the order in which they normalise, mirror, pad and crop."""

from __future__ import annotations

from dataclasses import replace

from fedflat.data.preprocess import Preprocess
from fedflat.data.resized_crop import ResizedCrop
from fedflat.errors import InputError, UnknownNameError

_CIFAR100_001 = Preprocess((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_CIFAR100_000 = Preprocess((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
_MIDDLE = Preprocess((0.5,), (0.5,))
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

PLAIN: dict[str, Preprocess] = {
    "digits": Preprocess((0.3053,), (0.3760,), scale=16.0),
    "mnist": Preprocess((0.1307,), (0.3081,)),
    "fashion_mnist": Preprocess((0.2860,), (0.3530,)),
    "npz": _MIDDLE,
    "folder": _MIDDLE,
    "hf": _MIDDLE,
}
"""Normalisation of the data sets that no paper here prescribes one for."""

PAPERS: dict[str, dict[str, Preprocess]] = {
    "paper000": {
        "cifar10": Preprocess((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        "cifar100": _CIFAR100_000,
        "tiny_imagenet": Preprocess(*_IMAGENET),
    },
    "paper001": {
        "cifar10": Preprocess((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "cifar100": _CIFAR100_001,
    },
    "paper003": {
        "cifar10": Preprocess((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "cifar100": _CIFAR100_000,
    },
    "paper004": {
        "cifar10": Preprocess((125.3, 123.0, 113.9), (63.0, 62.1, 66.7), scale=1.0),
        "cifar100": _CIFAR100_001,
    },
}
"""Normalisation constants by paper and data set."""

PHOTOGRAPHS: dict[str, ResizedCrop] = {"imagenet200": ResizedCrop(*_IMAGENET, flip=0.5)}
"""Photographs, of which training crops a random part: "auto" and "paper001"; "none" takes the centre."""

AUGMENTATION: dict[str, dict[str, float | int | bool]] = {
    "paper000": {"flip": 0.5, "pad": 4, "crop": 0.5, "black": False},
    "paper001": {"flip": 0.5, "pad": 4, "crop": 1.0, "black": True},
    "paper003": {"flip": 0.5, "pad": 4, "crop": 1.0, "black": True},
    "paper004": {},
}
"""What each paper does to training images besides normalising them."""


def recipe(name: str, data: str) -> Preprocess:
    """Preprocessing by name for a data set.

    name: "auto" (the MAN paper's for CIFAR and Tiny-ImageNet, otherwise plain normalisation), "none" (normalise
    only, with auto's constants), or "paper000", "paper001", "paper003", "paper004" (no augmentation) for the
    data sets they use.

    >>> recipe("paper000", "cifar10").crop
    0.5
    """
    if name not in ("auto", "none", *PAPERS):
        raise UnknownNameError("augmentation", name, ("auto", "none", *PAPERS))
    if data in PHOTOGRAPHS and name in ("auto", "none", "paper001"):
        return PHOTOGRAPHS[data] if name != "none" else replace(PHOTOGRAPHS[data], flip=0.0, random=False)
    paper = "paper000" if name in ("auto", "none") else name
    if name in ("auto", "none") and data in PLAIN:
        return PLAIN[data]
    if data not in PAPERS[paper]:
        if data not in {**PLAIN, **PHOTOGRAPHS, **PAPERS["paper000"]}:
            raise UnknownNameError("data set", data, [*PLAIN, *PHOTOGRAPHS, *PAPERS["paper000"]])
        raise InputError(
            f"augmentation {name!r} is stated for {', '.join(PAPERS[paper])}, not for {data}; use 'auto' or 'none'"
        )
    base = PAPERS[paper][data]
    return base if name == "none" else replace(base, **AUGMENTATION[paper])  # type: ignore[arg-type]
