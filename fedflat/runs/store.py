"""The state that clients keep between rounds, in memory and on disk."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fedflat.core.tensors import State, States, copied, flatten, nest
from fedflat.engine.backends.base import RemoteStates
from fedflat.errors import CheckpointError
from fedflat.runs.files import metadata_of, pack_tensors, read_tensors, sync, write_atomically
from fedflat.runs.versions import Versions

MEMORY = 1 << 30
OVERHEAD = 1 << 10  # bytes that a state needs in memory besides its numbers
NAME = re.compile(r"\d{1,12}\.\d{1,9}\.safetensors")  # client and version
SHARD = 1000  # clients per folder of state files
SECURED = 20  # rounds between copies of remote states to this disk: a lost state is computed again from such a copy


class ClientStore:
    """The states of the clients that have taken part: in memory up to a budget, on disk beyond it.

    States on other machines stay there, within the same budget. They are written to disk at checkpoints and every
    `SECURED` rounds.

    A state is written under its version, the round that produced it. A checkpoint lists the versions that it needs.
    Their files are deleted only when two newer checkpoints exist, so the process can be killed at any moment. A file
    says which run, client and round it is of, which is checked when it is read and before it is deleted.

    Args:
        folder: Where states are written; None is a temporary folder that is deleted with the store.
        memory: The budget in bytes.
        run: The run that the states belong to; see `identity`.
    """

    def __init__(self, folder: Path | None = None, memory: int = MEMORY, run: str = "") -> None:
        self._folder, self._run = folder, run
        self.memory = memory
        self.versions = Versions()  # client → round of its latest committed state
        self._hot: OrderedDict[int, tuple[Mapping[str, State], int]] = OrderedDict()  # oldest first, with sizes
        self._bytes = 0
        self._dirty: set[int] = set()  # clients whose state is not on disk yet
        self._pending: dict[int, Mapping[str, State]] = {}  # of the current round
        self._saved = Versions()  # client → version in the last checkpoint
        self._before = Versions()  # client → version in the checkpoint before it
        self._written = Versions()  # client → latest version on disk

    @property
    def folder(self) -> Path:
        """The folder that states are written to."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedflat-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def __len__(self) -> int:
        return len(self.versions)

    def get(self, client: int) -> Mapping[str, State]:
        """The state of a client; empty if it has never taken part. Do not change it in place."""
        if client in self._hot:
            self._hot.move_to_end(client)
            return self._hot[client][0]
        if client not in self.versions:
            return {}
        states = self._read(client, self.versions[client])
        self._admit(client, states)
        return states

    def put(self, client: int, states: Mapping[str, State]) -> None:
        """Copy a client's new state; it becomes current with `commit_round`."""
        if not isinstance(states, RemoteStates) and states:
            states = {part: state for part, state in copied(states).items() if state}
        if states or client in self.versions:
            self._pending[client] = states

    def forget_pending(self) -> None:
        """Drop the new states of a failed round."""
        self._pending.clear()

    def commit_round(self, round: int) -> None:
        """Make the pending states the current ones."""
        for client, states in self._pending.items():
            self._dirty.discard(client)
            self._bytes -= self._hot.pop(client, ({}, 0))[1]
            self.versions.pop(client, None)
            if states:  # a client whose state became empty is as if it had never taken part
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
        content = pack_tensors(flatten(states), self._about(client, version))
        write_atomically(self._path(client, version), content, lasting=False)
        if isinstance(states, RemoteStates):
            states.secure(partial(self._read, client, version))
        self._dirty.discard(client)
        self._written[client] = version
        if last not in (None, version, self._saved.get(client), self._before.get(client)):
            self._path(client, last).unlink(missing_ok=True)  # it is in no checkpoint

    def _read(self, client: int, version: int) -> States:
        return nest(read_tensors(self._path(client, version), self._about(client, version)))

    def _about(self, client: int, version: int) -> dict[str, str]:
        return {"run": self._run, "client": str(client), "round": str(version)}

    def _path(self, client: int, version: int) -> Path:
        return self.folder / str(client // SHARD) / f"{client}.{version}.safetensors"

    def flush(self) -> Versions:
        """Write all states that are not on disk yet. Returns the versions for the next checkpoint."""
        for client in sorted(self._dirty):
            self._write(client)
        paths = [self._path(client, version) for client, version in self.versions.unlike(self._saved)]
        if paths:
            sync([*paths, *sorted({path.parent for path in paths}), self.folder])
        return self.versions.copy()

    def secure(self) -> None:
        """Write the states that are only on other machines."""
        for client in sorted(client for client in self._dirty if isinstance(self._hot[client][0], RemoteStates)):
            self._write(client)

    def settle(self) -> None:
        """Delete the files that are not needed any more after a new checkpoint."""
        if not self.versions.unlike(self._saved) and not self._saved.unlike(self.versions):
            return  # the same checkpoint again
        for client, version in self._before.unlike(self._saved):
            if self.versions.get(client) != version:
                self._path(client, version).unlink(missing_ok=True)
        self._before, self._saved = self._saved, self.versions.copy()

    def restore(self, versions: Mapping[int, int], before: Mapping[int, int] | None = None) -> None:
        """Go back to the versions of a checkpoint; `before` has those of the checkpoint before it."""
        self.versions = Versions(versions)
        self._saved, self._written = self.versions.copy(), self.versions.copy()
        self._before = Versions(before)

    def check(self, versions: Mapping[int, int], before: Mapping[int, int]) -> None:
        """Raise `CheckpointError` if files of a checkpoint are missing, or damaged and not of the one before, too."""
        present = set(self._files())
        for client, version in versions.items():
            if self._path(client, version) not in present:
                raise CheckpointError(f"{self._path(client, version)} is missing: the run folder is incomplete")
            if before.get(client) != version:
                self._read(client, version)

    def prune(self) -> None:
        """Delete the files of this run that neither of the last two checkpoints lists."""
        for path in self._files():
            client, version = map(int, path.name.split(".")[:2])
            listed = version in (self._saved.get(client), self._before.get(client))
            if not listed and metadata_of(path).items() >= self._about(client, version).items():
                path.unlink()

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("*/*.safetensors") if NAME.fullmatch(path.name)]


def _bytes(states: Mapping[str, State]) -> int:
    if isinstance(states, RemoteStates):
        return states.size
    return sum(tensor.numel() * tensor.element_size() for state in states.values() for tensor in state.values())
