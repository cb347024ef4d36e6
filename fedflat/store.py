"""What clients keep from round to round, in memory and on disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import weakref
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import CheckpointError
from fedflat.method import State, copied
from fedflat.rounds import Rounds

States = dict[str, State]
MEMORY = 1 << 30
OVERHEAD = 1 << 10  # bytes that any state takes in memory beside its numbers
SHARD = 1000  # clients in one folder of state files
MANY = 50  # files from which on it is quicker to have the whole file system write what it holds
SECURED = 20  # rounds after which states that lie elsewhere are written here: one that is lost is made again from there


def write_atomically(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Write under a temporary name and rename, so that `path` is never seen half written, even after a power cut.

    lasting: whether it is on the disk when this returns; else a power cut may cost it until `sync` is called.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def sync(paths: Sequence[Path]) -> None:
    """Have files of one file system on the disk: many of them by one call, where one each would take seconds."""
    whole = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if len(paths) > MANY else None
    for path in paths[:1] if whole else paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if whole is None:
                os.fsync(descriptor)
            elif whole(descriptor):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        finally:
            os.close(descriptor)


def flatten(states: Mapping[str, State]) -> dict[str, Tensor]:
    """{part: {name: tensor}} with joined names."""
    return {f"{part}/{name}": t for part, state in states.items() for name, t in state.items()}


def nest(flat: dict[str, Tensor]) -> States:
    """The inverse of `flatten`."""
    states: States = {}
    for key, tensor in flat.items():
        part, name = key.split("/", 1)
        states.setdefault(part, {})[name] = tensor
    return states


def pack_tensors(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file with a checksum of its content."""
    copies = {name: t.detach().contiguous().clone() for name, t in tensors.items()}
    return save(copies, {"crc32": str(_checksum(copies))})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file, or an error that names it."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            recorded = (file.metadata() or {}).get("crc32")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run folder is incomplete") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
    if recorded is not None and recorded != str(_checksum(tensors)):
        raise CheckpointError(f"{path} is damaged (its checksum is not the recorded one); nothing was deleted")
    return tensors


def _checksum(tensors: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), total))
    return total


class Away(Mapping[str, State]):
    """A client's states that lie on another machine, where they may be lost. Looking at them fetches them.

    size: bytes that they take there.
    """

    size = 0

    @abstractmethod
    def fetch(self) -> States:
        """A copy on this machine."""

    @abstractmethod
    def secure(self, read: Callable[[], States]) -> None:
        """Be told that they are on this machine's disk as well, where `read` finds them."""

    def __getitem__(self, part: str) -> State:
        return self.fetch()[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetch())

    def __len__(self) -> int:
        return len(self.fetch())

    def __bool__(self) -> bool:
        return True  # what is empty is not kept anywhere

    def items(self) -> ItemsView[str, State]:
        """All of them at once."""
        return self.fetch().items()


class ClientStore:
    """The state of the clients that took part, in memory up to a budget and on disk beyond it.

    States that lie on another machine stay there within that budget; they are written at checkpoints, and every few
    rounds.

    Every state is written under a version, the round that made it. A checkpoint names the versions it needs, and the
    files it names are deleted only once a newer one is in place: killing the process at any moment loses nothing.
    folder: where; None is a temporary folder that goes away with the store.
    """

    def __init__(self, folder: Path | None = None, memory: int = MEMORY) -> None:
        self._folder = folder
        self.memory = memory
        self.versions = Rounds()  # client → round of its latest committed state
        self._hot: OrderedDict[int, tuple[Mapping[str, State], int]] = OrderedDict()  # latest last, with their bytes
        self._bytes = 0
        self._dirty: set[int] = set()  # in memory only
        self._pending: dict[int, Mapping[str, State]] = {}  # of the round under way
        self._saved = Rounds()  # client → version named by the last checkpoint
        self._written = Rounds()  # client → latest version on disk

    @property
    def folder(self) -> Path:
        """Where states are written."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedflat-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def get(self, client: int) -> Mapping[str, State]:
        """What the client keeps; empty for one that never took part. Not to be written to."""
        if client in self._hot:
            self._hot.move_to_end(client)
            return self._hot[client][0]
        if client not in self.versions:
            return {}
        states = self._read(client, self.versions[client])
        self._admit(client, states)
        return states

    def put(self, client: int, states: Mapping[str, State]) -> None:
        """Take a copy of a client's new state; it counts once the round is committed."""
        if not isinstance(states, Away):
            states = {part: state for part, state in copied(states).items() if state}
        if states or client in self.versions:
            self._pending[client] = states

    def forget_pending(self) -> None:
        """Drop what a round that failed has put."""
        self._pending.clear()

    def commit_round(self, round: int) -> None:
        """Make the pending states the current ones."""
        for client, states in self._pending.items():
            self._dirty.discard(client)
            self._bytes -= self._hot.pop(client, ({}, 0))[1]
            self.versions.pop(client, None)
            if states:  # a client that keeps nothing any more is as one that never took part
                self.versions[client] = round
                self._dirty.add(client)
                self._admit(client, states)
        self._pending.clear()
        if round % SECURED == 0:
            self.secure()

    def _admit(self, client: int, states: Mapping[str, State]) -> None:
        size = OVERHEAD + _bytes(states)
        self._hot[client] = states, size
        self._bytes += size
        while self._bytes > self.memory and len(self._hot) > 1:
            oldest = next(iter(self._hot))
            self._write(oldest)
            self._bytes -= self._hot.pop(oldest)[1]

    def _write(self, client: int) -> None:
        if client not in self._dirty:
            return
        version, last, states = self.versions[client], self._written.get(client), self._hot[client][0]
        write_atomically(self._path(client, version), pack_tensors(flatten(states)), lasting=False)
        if isinstance(states, Away):
            states.secure(partial(self._read, client, version))
        self._dirty.discard(client)
        self._written[client] = version
        if last not in (None, version, self._saved.get(client)):
            self._path(client, last).unlink(missing_ok=True)  # no checkpoint ever named it

    def _read(self, client: int, version: int) -> States:
        return nest(read_tensors(self._path(client, version)))

    def _path(self, client: int, version: int) -> Path:
        return self.folder / str(client // SHARD) / f"{client}.{version}.safetensors"

    def flush(self) -> Rounds:
        """Write all that is in memory only; returns the versions a checkpoint must name, which are on the disk then."""
        for client in sorted(self._dirty):
            self._write(client)
        sync([self._path(client, version) for client, version in self.versions.unlike(self._saved)])
        return self.versions.copy()

    def secure(self) -> None:
        """Write what lies on other machines only."""
        for client in sorted(client for client in self._dirty if isinstance(self._hot[client][0], Away)):
            self._write(client)

    def settle(self) -> None:
        """Delete the files that the checkpoint just written has made superfluous."""
        for client, version in self._saved.unlike(self.versions):
            self._path(client, version).unlink(missing_ok=True)
        self._saved = self.versions.copy()

    def restore(self, versions: Mapping[int, int], *, prune: bool = True) -> None:
        """Go back to a checkpoint's versions. prune: delete the files that it does not name."""
        self.versions = Rounds(versions)
        self._saved, self._written = self.versions.copy(), self.versions.copy()
        if prune:
            known = {self._path(client, version) for client, version in versions.items()}
            for path in self.folder.glob("*/*.safetensors"):
                if path not in known:
                    path.unlink()


def _bytes(states: Mapping[str, State]) -> int:
    if isinstance(states, Away):
        return states.size
    return sum(tensor.numel() * tensor.element_size() for state in states.values() for tensor in state.values())
