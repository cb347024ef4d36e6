"""Texts by speaker: windows of characters, made when they are asked for and never stored."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedflat.core.samples import IGNORED
from fedflat.data.federation import Federation
from fedflat.data.sources import data_root
from fedflat.errors import DataError, InputError

log = logging.getLogger(__name__)
LEAF = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""LEAF's alphabet of 80 characters; the index of a character is its position."""
TFF = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""TFF's alphabet of 86 characters; the index of a character is its position + 1."""
PAD, UNKNOWN, BEGIN, END = 0, len(TFF) + 1, len(TFF) + 2, len(TFF) + 3  # TFF's other symbols: 90 in all


class Windows:
    """Windows of a text: `length` characters, and the one that follows them.

    Args:
        codes: The text as numbers.
        starts: Where the windows begin.
        length: Characters in a window.
        every: Whether to predict the next character at every position of the window, rather than after the last one.
        pad: A symbol that fills windows up and is never a target.
    """

    def __init__(self, codes: Tensor, starts: Tensor, length: int, every: bool = False, pad: int | None = None) -> None:
        self.codes, self.starts, self.every, self.pad = codes, starts, every, pad
        self._span = torch.arange(length + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (batch, length) and targets (batch,) or (batch, length) at these positions."""
        rows = self.codes[self.starts[indices][:, None] + self._span].long()
        y = rows[:, 1:] if self.every else rows[:, -1]
        return rows[:, :-1], y if self.pad is None else torch.where(y == self.pad, IGNORED, y)


def shakespeare(
    root: Path | None,
    fraction: float = 0.8,
    length: int = 80,
    stride: int = 1,
    least: int = 0,
    every: bool = False,
    convention: Literal["leaf", "tff"] = "leaf",
) -> Federation:
    """Shakespeare's plays in LEAF's layout, one client per role: what is the next character?

    It is read from shakespeare/data/raw_data/by_play_and_character/*.txt, which LEAF's script makes. fraction: share
    of a role's windows that train; the test windows share no character with them, and a role without both is left out.
    length: characters in a window. stride: characters from one window to the next, 1 as in LEAF. least: roles with
    fewer windows are left out, LEAF's -k. every: predict at every position; the network needs every=True, too.
    convention: "tff" has TFF's 90 symbols and chunks instead, always predicts at every position, and takes no stride.
    A role's first lines train, and each part is one text from its begin to its end symbol: LEAF's files do not tell
    where a speech begins.
    """
    folder = data_root(root) / "shakespeare" / "data" / "raw_data" / "by_play_and_character"
    if convention == "leaf":
        return _by_characters(folder, "shakespeare", LEAF, (fraction, length, stride, least, every))
    if stride != 1:
        raise InputError("shakespeare: chunks of convention='tff' follow one another, so stride must stay 1")
    _check("shakespeare", fraction, length, stride)
    table = _table(TFF, 1, UNKNOWN)
    cuts = {role: _chunks(said, table, fraction, length) for role, said in _lines(folder, "shakespeare").items()}
    return _federation(folder, "shakespeare", cuts, length, least, classes=END + 1, every=True, pad=PAD)


def tiny_shakespeare(
    root: Path | None, fraction: float = 0.9, length: int = 80, stride: int = 20, least: int = 1000, every: bool = False
) -> Federation:
    """1.1 MB of Shakespeare, one client per speaking role (the char-rnn file, public domain): the next character?

    It is read from tiny_shakespeare/by_character/ROLE.txt. fraction, length, every: as for `shakespeare`. stride:
    windows begin every 20 characters, 5 % of all. least: roles with fewer characters are left out, 160 of 302.
    """
    folder = data_root(root) / "tiny_shakespeare" / "by_character"
    return _by_characters(folder, "tiny_shakespeare", "", (fraction, length, stride, max(0, least - length), every))


class Cut(NamedTuple):
    """The text of a role, and where its training and its test windows begin. windows: how many it has for `least`."""

    codes: Tensor
    windows: int
    train: Tensor
    test: Tensor


def _by_characters(folder: Path, name: str, alphabet: str, how: tuple[float, int, int, int, bool]) -> Federation:
    """LEAF's windows of a folder of texts. alphabet: known characters; empty for those that occur."""
    fraction, length, stride, least, every = how
    _check(name, fraction, length, stride)
    texts = {role: re.sub("  +", " ", " ".join(said)) for role, said in _lines(folder, name).items()}
    codes, classes = _encoded("".join(texts.values()), alphabet)
    each = zip(texts, torch.split(codes, [len(text) for text in texts.values()]), strict=True)
    cuts = {role: _windows(own, fraction, length, stride) for role, own in each}
    return _federation(folder, name, cuts, length, least, classes=classes, every=every)


def _check(name: str, fraction: float, length: int, stride: int) -> None:
    if not 0 < fraction < 1 or length < 1 or stride < 1:
        raise InputError(f"{name}: fraction must lie between 0 and 1, length and stride must be 1 or more")


def _lines(folder: Path, name: str) -> dict[str, list[str]]:
    """The lines of every role, by the names of the files."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(f"data set {name} is not here: {folder} holds no .txt file per role; see --data-root")
    return {file.stem: file.read_text(encoding="utf-8").splitlines() for file in files}


def _windows(codes: Tensor, fraction: float, length: int, stride: int) -> Cut:
    """LEAF's split: training windows first, then test windows that share no character with them."""
    windows = max(len(codes) - length, 0)
    cut = int(fraction * windows)
    later = cut + length - 1
    return Cut(codes, windows, torch.arange(0, cut, stride), torch.arange(later, max(windows, later), stride))


def _chunks(said: Sequence[str], table: np.ndarray, fraction: float, length: int) -> Cut:
    """TFF's chunks of `length` + 1 symbols: of the first lines for training, of the others for the test."""
    first = int(fraction * len(said))
    parts, starts, begin = list[np.ndarray](), list[Tensor](), 0
    for lines in (said[:first], said[first:]):
        symbols = np.concatenate([[BEGIN], table[_points("\n".join(lines))], [END]]) if lines else np.array([])
        symbols = symbols[: len(symbols) - (len(symbols) % (length + 1) == 1)]  # a last one alone has no target
        symbols = np.pad(symbols, (0, -len(symbols) % (length + 1)), constant_values=PAD)
        starts.append(torch.arange(begin, begin + len(symbols), length + 1))
        parts.append(symbols)
        begin += len(symbols)
    return Cut(torch.from_numpy(np.concatenate(parts).astype(np.uint8)), sum(map(len, starts)), *starts)


def _federation(folder: Path, name: str, cuts: dict[str, Cut], length: int, least: int, **how: Any) -> Federation:
    """Clients of the roles that have training and test windows, and as many of both together as are asked for."""
    classes = how.pop("classes")
    whole = {role: cut for role, cut in cuts.items() if len(cut.train) and len(cut.test)}
    kept = {role: cut for role, cut in whole.items() if cut.windows >= least}
    if not kept:
        raise DataError(f"{folder}: no role has enough characters for training and test windows of {length}")
    short = sum(cut.windows >= least and role not in whole for role, cut in cuts.items())
    if short:
        why = f"too short for training and test windows of {length} characters"
        log.warning("%s: %d of %d roles are left out: %s", name, short, len(cuts), why)
    codes = torch.cat([cut.codes for cut in kept.values()])
    begins = np.cumsum([0, *(len(cut.codes) for cut in kept.values())]).tolist()
    places = list(zip(kept.values(), begins, strict=False))

    def windows(starts: Tensor) -> Windows:
        return Windows(codes, starts, length, **how)

    tests = [begin + cut.test for cut, begin in places]
    return Federation(
        {role: windows(begin + cut.train) for role, (cut, begin) in zip(kept, places, strict=True)},
        windows(torch.cat(tests)),
        [windows(starts) for starts in tests],
        sizes=[len(cut.train) for cut in kept.values()],
        classes=classes,
        name=name,
        partition="natural",
        task="next_token",
    )


def _encoded(text: str, alphabet: str) -> tuple[Tensor, int]:
    """The characters as numbers, and how many numbers there are. Unknown characters share one more number."""
    points = _points(text)
    found = "".join(map(chr, np.unique(points)))
    known = alphabet or found
    return torch.from_numpy(_table(known, 0, len(known))[points]), len(known) + bool(set(found) - set(known))


def _points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _table(known: str, first: int, unknown: int) -> np.ndarray:
    """The number of every character: its position in `known`, counted from `first`."""
    table = np.full(0x110000, unknown, dtype=np.uint8)
    table[[ord(character) for character in known]] = np.arange(first, first + len(known))
    return table
