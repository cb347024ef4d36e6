"""Damage to files, by chance: what disks, editors and strangers do to them."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

NUMBER = re.compile(rb"-?\d+(\.\d+)?(e-?\d+)?")
STAND_INS = (
    *(b"null", b'"x"', b"[]", b"{}", b"-1", b"0", b"1e400", b"true", b"NaN"),
    *(b"9" * 400, b"9" * 5000, b'"\\u001b[2J"'),
)
INSERTS = (b"\xff\xfe", b"\x00" * 9, b"\x1b[2J", b"{", b"]", b'"', b"\n")
NESTED = b"[" * 100_000


def mutate(content: bytes, luck: random.Random) -> bytes:
    """The content with one damage."""
    place = luck.randrange(len(content) + 1)
    kind = luck.randrange(9)
    if kind == 0 and content:
        place = luck.randrange(len(content))
        return content[:place] + bytes([content[place] ^ (1 << luck.randrange(8))]) + content[place + 1 :]
    if kind == 1:
        return content[:place]
    if kind == 2:
        return content[:place] + luck.choice(INSERTS) + content[place:]
    if kind == 3:
        return content[:place] + content[place + luck.randrange(1, 30) :]
    if kind in (4, 5):
        numbers = list(NUMBER.finditer(content))
        if numbers:
            found = luck.choice(numbers)
            return content[: found.start()] + luck.choice(STAND_INS) + content[found.end() :]
    if kind == 6:
        lines = content.splitlines(keepends=True)
        luck.shuffle(lines)
        return b"".join(lines[: luck.randrange(len(lines) + 1)])
    if kind == 7:
        return luck.choice([b"", b"[]", b"{}", b"null", b'"text"', NESTED, b"[1, 2]\n" * 3, b"\x80\x04K\x01."])
    return content[:place] + content[: luck.randrange(1, 40)] + content[place:]


def mutant(folder: Path, target: Path, luck: random.Random) -> str:
    """A copy of a folder with one file damaged, deleted, swapped with another, or replaced by a folder."""
    shutil.copytree(folder, target)
    files = sorted(path for path in target.rglob("*") if path.is_file() and not path.name.startswith("."))
    path, kind = luck.choice(files), luck.randrange(12)
    if kind == 0:
        path.unlink()
        return f"{path.name} deleted"
    if kind == 1:
        other = luck.choice(files)
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return f"{path.name} and {other.name} swapped"
    if kind == 2:
        path.unlink()
        path.mkdir()
        return f"{path.name} made a folder"
    path.write_bytes(mutate(path.read_bytes(), luck))
    return f"{path.name} damaged"
