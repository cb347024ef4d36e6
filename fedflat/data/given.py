"""A partition from a file: the client lists that papers have published."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.data.arrays import Targets
from fedflat.data.indices import Split
from fedflat.errors import PartitionError

NAMED = re.compile(r"img_(\d+)_label_(\d+)\.png")


def given(targets: Targets, clients: int, rng: np.random.Generator, path: str) -> Split:
    """The division in a file: the lists of FedSAM's, FedGloSS's and FedACG's repositories for CIFAR-10.

    path: a JSON file in LEAF's layout whose samples are named img_INDEX_label_CLASS.png, or a text file with a Python
    dictionary {client: indices}. Indices count the training samples. Sizes come from the lists themselves.
    """
    lists = _read(Path(path).expanduser(), targets)
    if len(lists) != clients:
        raise PartitionError(f"{path} divides the data among {len(lists)} clients: set clients={len(lists)}")
    every = np.concatenate(lists) if lists else np.empty(0, np.int64)
    total = len(targets.labels)
    if len(every) and not 0 <= every.min() <= every.max() < total:
        raise PartitionError(f"{path} names sample {every.max()}, but there are {total}: it belongs to other data")
    if len(np.unique(every)) < len(every):
        raise PartitionError(f"{path} gives a sample to two clients")
    return Split.of(lists)


def _read(path: Path, targets: Targets) -> list[np.ndarray]:
    try:
        text = path.read_text()
        if path.suffix == ".json":
            return _named(json.loads(text), targets, path)
        table = ast.literal_eval(text)
        return [np.array(sorted(table[client]), dtype=np.int64) for client in sorted(table)]
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PartitionError):
            raise
        raise PartitionError(f"{path} is no list of clients ({type(error).__name__}: {error})") from None


def _named(stored: dict[str, Any], targets: Targets, path: Path) -> list[np.ndarray]:
    held = stored["user_data"] if "user_data" in stored else stored["users_data"]
    lists = []
    for user in stored["users"]:
        found = [NAMED.fullmatch(name) for name in held[str(user)]["x"]]
        if None in found:
            raise PartitionError(f"{path}: user {user} has a sample that is not named img_INDEX_label_CLASS.png")
        pairs = np.array([match.groups() for match in found if match], dtype=np.int64).reshape(-1, 2)
        inside = pairs[pairs[:, 0] < len(targets.labels)]
        if (targets.labels[inside[:, 0]] != inside[:, 1]).any():
            raise PartitionError(f"{path}: labels differ from those of the data; it belongs to another data set")
        lists.append(pairs[:, 0])
    return lists
