"""Power cuts of a real file system: an ext4 image that is written to, copied as it lies on the disk at a moment."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from helpers import assert_same_run

from torture.power import SIZES, go

MEGABYTES = 16


def new_image(path: Path) -> None:
    """An empty file system in a file."""
    with path.open("wb") as file:
        file.truncate(MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    """The file system at a place; its journal is replayed where it was not unmounted."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True, capture_output=True)
    try:
        yield place
    finally:
        gc.collect()  # files that this process has mapped
        for _ in range(100):  # a process that was killed may still hold it
            if subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        else:
            subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@cache
def hindrance() -> str:
    """Why images cannot be mounted on this machine; empty if they can."""
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            new_image(Path(folder) / "image")
            with mounted(Path(folder) / "image", Path(folder) / "disk"):
                return ""
        except (subprocess.CalledProcessError, OSError) as error:
            said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
            return f"images cannot be mounted: {str(said).strip()}"


def at_this_moment(image: Path, copy: Path) -> None:
    """Copy a live image. Two copies that agree are of one moment: nothing was written between them."""
    shutil.copyfile(image, copy)
    while True:
        before = copy.read_bytes()
        shutil.copyfile(image, copy)
        if copy.read_bytes() == before:
            return


def cut(place: Path, image: Path, copy: Path, after: float) -> None:
    """Have a run go on in an image, and copy the image after some seconds; then the run is killed."""
    with mounted(image, place / "disk") as disk:
        pid = os.fork()
        if pid == 0:
            go(disk / "run")
            os._exit(0)
        time.sleep(after)
        os.kill(pid, signal.SIGSTOP)
        at_this_moment(image, copy)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def image_cuts(place: Path, count: int) -> list[str]:
    """What is wrong after so many cuts, one or two of every run."""
    logging.getLogger("fedflat").setLevel(logging.ERROR)  # it tells of checkpoints that it cannot use
    reference, luck, wrong, done = go(None), random.Random(0), list[str](), 0
    try:
        while done < count:
            image = place / f"image-{done}"  # the kernel may hold the last one for a moment more
            new_image(image)
            for _ in range(min(luck.choice([1, 2]), count - done)):
                done += 1
                copy = place / f"cut-{done}"
                cut(place, image, copy, luck.uniform(0.0, 0.8))
                image.unlink()
                image = copy
            try:
                with mounted(image, place / "disk") as disk:
                    assert_same_run(go(disk / "run"), reference, len(SIZES))
            except Exception as error:
                wrong.append(f"cut {done}: {type(error).__name__} {error}")
    finally:
        logging.getLogger("fedflat").setLevel(logging.NOTSET)
    return wrong
