"""Texts by speaker: windows of characters, made when they are asked for and never stored."""

from __future__ import annotations

import logging
import re
import string
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedflat.data.federation import Federation
from fedflat.data.sources import data_root
from fedflat.errors import DataError, InputError

log = logging.getLogger(__name__)
LEAF = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""LEAF's alphabet of 80 characters; the index of a character is its position."""


class Windows:
    """Windows of a text: `length` characters, and the one that follows them.

    Args:
        codes: The text as numbers.
        starts: Where the windows begin.
        length: Characters in a window.
        every: Whether to predict the next character at every position of the window, rather than after the last one.
    """

    def __init__(self, codes: Tensor, starts: Tensor, length: int, every: bool = False) -> None:
        self.codes, self.starts, self.every = codes, starts, every
        self._span = torch.arange(length + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (batch, length) and targets (batch,) or (batch, length) at these positions."""
        rows = self.codes[self.starts[indices][:, None] + self._span].long()
        return rows[:, :-1], rows[:, 1:] if self.every else rows[:, -1]


def shakespeare(
    root: Path | None, fraction: float = 0.8, length: int = 80, stride: int = 1, least: int = 0, every: bool = False
) -> Federation:
    """Shakespeare's plays in LEAF's layout, one client per role: what is the next character?

    It is read from shakespeare/data/raw_data/by_play_and_character/*.txt, which LEAF's script makes. fraction: share
    of a role's windows that train; the test windows share no character with them, and a role without both is left out.
    length: characters in a window. stride: characters from one window to the next, 1 as in LEAF. least: roles with
    fewer windows are left out, LEAF's -k. every: predict at every position, as TFF does; the network needs every=True.
    """
    folder = data_root(root) / "shakespeare" / "data" / "raw_data" / "by_play_and_character"
    return _roles(folder, "shakespeare", LEAF, (fraction, length, stride, least, every))


def tiny_shakespeare(
    root: Path | None, fraction: float = 0.9, length: int = 80, stride: int = 20, least: int = 1000, every: bool = False
) -> Federation:
    """1.1 MB of Shakespeare, one client per speaking role (the char-rnn file, public domain): the next character?

    It is read from tiny_shakespeare/by_character/ROLE.txt. fraction, length, every: as for `shakespeare`. stride:
    windows begin every 20 characters, 5 % of all. least: roles with fewer characters are left out, 160 of 302.
    """
    folder = data_root(root) / "tiny_shakespeare" / "by_character"
    return _roles(folder, "tiny_shakespeare", "", (fraction, length, stride, max(0, least - length), every))


def _roles(folder: Path, name: str, alphabet: str, how: tuple[float, int, int, int, bool]) -> Federation:
    """Clients of a folder of texts. alphabet: known characters; empty for those that occur."""
    fraction, length, stride, least, every = how
    if not 0 < fraction < 1 or length < 1 or stride < 1:
        raise InputError(f"{name}: fraction must lie between 0 and 1, length and stride must be 1 or more")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(f"data set {name} is not here: {folder} holds no .txt file per role; see --data-root")
    texts = [re.sub("  +", " ", " ".join(file.read_text(encoding="utf-8").splitlines())) for file in files]
    codes, classes = _encoded("".join(texts), alphabet)
    train, tests, begin, short = list[Tensor](), list[Tensor](), 0, 0
    for text in texts:
        windows = len(text) - length
        cut = int(fraction * max(windows, 0))
        first, second = (
            torch.arange(0, cut, stride),
            torch.arange(cut + length - 1, max(windows, cut + length - 1), stride),
        )
        if windows >= max(1, least) and len(first) and len(second):
            train.append(begin + first)
            tests.append(begin + second)
        short += max(0, windows) >= least and not (len(first) and len(second))
        begin += len(text)
    if not train:
        raise DataError(f"{folder}: no role has enough characters for training and test windows of {length}")
    if short:
        why = f"too short for training and test windows of {length} characters"
        log.warning("%s: %d of %d roles are left out: %s", name, short, len(texts), why)
    return Federation(
        [Windows(codes, starts, length, every) for starts in train],
        Windows(codes, torch.cat(tests), length, every),
        [Windows(codes, starts, length, every) for starts in tests],
        sizes=[len(starts) for starts in train],
        classes=classes,
        name=name,
        partition="natural",
        task="next_token",
    )


def _encoded(text: str, alphabet: str) -> tuple[Tensor, int]:
    """The characters as numbers, and how many numbers there are. Unknown characters share one more number."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    found = "".join(map(chr, np.unique(points)))
    known = alphabet or found
    table = np.full(0x110000, len(known), dtype=np.uint8)
    table[[ord(character) for character in known]] = np.arange(len(known))
    return torch.from_numpy(table[points]), len(known) + bool(set(found) - set(known))
