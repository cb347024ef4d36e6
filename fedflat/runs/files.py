"""Files that survive a crash: written completely or not at all, and checked when they are read."""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import CheckpointError, RunError

CHECKSUM = "crc32"  # its name in the metadata of a file of tensors
MANY = 50  # with more files than this, one `syncfs` is faster than one `fsync` per file


def write_atomically(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Write a temporary file and rename it, so that `path` is never incomplete, even after a power failure.

    Args:
        path: The file.
        content: Its bytes.
        lasting: Wait until the file is on the disk. If False, a power failure may lose it until `sync` is called.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                if lasting:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        if lasting:
            sync([path.parent])  # the new name is stored in the folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file could not be written: what a full disk raises does not name it."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written ({error.strerror or error}); what was saved before is kept: make room or "
            "mend the folder, then run the same command again"
        ) from error


def sync(paths: Sequence[Path]) -> None:
    """Wait until these files and folders of one file system are on the disk."""
    whole = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if len(paths) > MANY else None
    for path in paths[:1] if whole else paths:
        if os.name == "nt" and path.is_dir():  # Windows stores names with the files
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if whole is None:
                os.fsync(descriptor)
            elif whole(descriptor):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        finally:
            os.close(descriptor)


def pack_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file whose metadata are `about` and a checksum of `about` and the tensors."""
    copies = {name: t.detach().contiguous().clone() for name, t in tensors.items()}
    return _ordered(save(copies, {**(about or {}), CHECKSUM: str(_checksum(copies, about or {}))}))


def _ordered(blob: bytes) -> bytes:
    """The same file with its metadata in alphabetical order: safetensors writes them in any order."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + blob[start:]


def read_tensors(path: Path, about: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Args:
        path: The file.
        about: Metadata that the file must have.

    Raises:
        CheckpointError: The file is missing, damaged, or about something else.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = dict(file.metadata() or {})
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run folder is incomplete") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
    recorded = found.pop(CHECKSUM, None)
    if recorded != str(_checksum(tensors, found)):
        raise CheckpointError(f"{path} is damaged (its checksum differs from the recorded one); nothing was deleted")
    other = [f"{key} {found.get(key)!r}" for key, value in (about or {}).items() if found.get(key) != value]
    if other:
        raise CheckpointError(f"{path} holds something else ({', '.join(other)}); nothing was deleted")
    return tensors


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if it is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return {}


def _checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> int:
    total = zlib.crc32(repr(sorted(about.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return total
