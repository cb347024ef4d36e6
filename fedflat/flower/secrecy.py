"""Files that only their owner may read: keys, seeds, states, run folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def owner_only(folder: Path | None = None) -> Iterator[None]:
    """Inside the block, new files have mode 0600 and new folders 0700. folder: made, or closed to others, at once."""
    before = os.umask(0o077)
    try:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        yield
    finally:
        os.umask(before)
