"""A lock on a file. The operating system releases it when the process ends, also when it is killed."""

from __future__ import annotations

import importlib
import os
from typing import Any


def claim(file: Any) -> None:
    """Lock an open file for this process. Raises `OSError` at once if another process has the lock."""
    if os.name == "nt":
        windows = importlib.import_module("msvcrt")
        windows.locking(file.fileno(), windows.LK_NBLCK, 1)
        return
    unix = importlib.import_module("fcntl")
    unix.flock(file, unix.LOCK_EX | unix.LOCK_NB)
