"""Data sets whose clients are given by nature: hospitals, writers, speaking roles. No partition divides them."""

from __future__ import annotations

from collections.abc import Callable

from fedflat.data.federation import Federation
from fedflat.data.heart import heart
from fedflat.data.leaf import femnist
from fedflat.data.photographs import landmarks, pacs
from fedflat.data.segmentation import camvid, cityscapes, idda
from fedflat.data.text import shakespeare, tiny_shakespeare
from fedflat.errors import InputError
from fedflat.experiment import Experiment

NATURAL: dict[str, Callable[..., Federation]] = {
    maker.__name__: maker
    for maker in (heart, femnist, shakespeare, tiny_shakespeare, camvid, cityscapes, idda, pacs, landmarks)
}
"""Data sets with clients of their own, by name; `DATASETS` has them, too."""
HOMES = {
    "femnist": "femnist/data",
    "shakespeare": "shakespeare/data/raw_data/by_play_and_character",
    "tiny_shakespeare": "tiny_shakespeare/by_character",
    "camvid": "CamVid",
    "cityscapes": "cityscapes",
    "idda": "IDDA",
    "pacs": "PACS",
    "landmarks": "landmarks",
    "imagenet200": "imagenet",
}
"""Where the files of data sets that are never fetched lie in the data root."""


def as_it_is(
    federation: Federation, data: str, partition: str | None, clients: int, augment: str, local_holdout: float
) -> Federation:
    """The federation, unless the experiment asks for another division of it."""
    if partition not in (None, federation.partition, Experiment.partition):
        raise InputError(f"{data} has clients of its own: leave partition= out, or write 'natural', not {partition!r}")
    if clients not in (len(federation), Experiment.clients):
        raise InputError(f"clients={clients}, but {data} has {len(federation)} clients: leave clients= out")
    if augment != "auto" or local_holdout:
        raise InputError(f"{data} has transforms and test sets of its own: leave augment= and local_holdout= out")
    federation.name = data
    return federation
