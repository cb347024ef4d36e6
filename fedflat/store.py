"""What lasts: client state, checkpoints, the run folder. Safetensors, JSON and TOML only; nothing is pickled."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedflat.errors import CheckpointError
from fedflat.experiment import Experiment
from fedflat.method import State

States = dict[str, State]
MEMORY = 1 << 30
SHARD = 1000  # clients in one folder of state files


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name and rename, so that `path` is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def flatten(states: States) -> dict[str, Tensor]:
    """{part: {name: tensor}} with joined names."""
    return {f"{part}/{name}": t for part, state in states.items() for name, t in state.items()}


def nest(flat: dict[str, Tensor]) -> States:
    """The inverse of `flatten`."""
    states: States = {}
    for key, tensor in flat.items():
        part, name = key.split("/", 1)
        states.setdefault(part, {})[name] = tensor
    return states


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file, or an error that names it."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the run folder is incomplete") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None


class ClientStore:
    """The state of the clients that took part, in memory up to a budget and on disk beyond it.

    Every state is written under a version, the round that made it. A checkpoint names the versions it needs, and
    older files are deleted only once a newer checkpoint is in place: killing the process at any moment loses nothing.
    """

    def __init__(self, folder: Path | None = None, memory: int = MEMORY) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="fedflat-"))
        self.memory = memory
        self.versions: dict[int, int] = {}  # client → round of its latest committed state
        self._hot: OrderedDict[int, tuple[States, int]] = OrderedDict()  # latest used last, with their bytes
        self._bytes = 0
        self._dirty: set[int] = set()  # in memory only
        self._pending: dict[int, States] = {}  # of the round under way
        self._saved: dict[int, int] = {}  # client → version named by the last checkpoint

    def get(self, client: int) -> States:
        """What the client keeps; empty for one that never took part. Not to be written to."""
        if client in self._hot:
            self._hot.move_to_end(client)
            return self._hot[client][0]
        if client not in self.versions:
            return {}
        states = nest(read_tensors(self._path(client, self.versions[client])))
        self._admit(client, states)
        return states

    def put(self, client: int, states: States) -> None:
        """Take a copy of a client's new state; it counts once the round is committed."""
        copies = {part: {name: t.clone() for name, t in state.items()} for part, state in states.items() if state}
        if copies:
            self._pending[client] = copies

    def forget_pending(self) -> None:
        """Drop what a round that failed has put."""
        self._pending.clear()

    def commit_round(self, round: int) -> None:
        """Make the pending states the current ones."""
        for client, states in self._pending.items():
            self.versions[client] = round
            self._dirty.add(client)
            self._admit(client, states)
        self._pending.clear()

    def _admit(self, client: int, states: States) -> None:
        self._bytes -= self._hot.pop(client, ({}, 0))[1]
        size = sum(t.numel() * t.element_size() for state in states.values() for t in state.values())
        self._hot[client] = states, size
        self._bytes += size
        while self._bytes > self.memory and len(self._hot) > 1:
            oldest = next(iter(self._hot))
            self._write(oldest)
            self._bytes -= self._hot.pop(oldest)[1]

    def _write(self, client: int) -> None:
        if client in self._dirty:
            write_atomically(self._path(client, self.versions[client]), save(flatten(self._hot[client][0])))
            self._dirty.discard(client)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / str(client // SHARD) / f"{client}.{version}.safetensors"

    def flush(self) -> dict[int, int]:
        """Write all that is in memory only; returns the versions a checkpoint must name."""
        for client in sorted(self._dirty):
            self._write(client)
        return dict(self.versions)

    def settle(self) -> None:
        """Delete the files that the checkpoint just written has made superfluous."""
        for client, version in self._saved.items():
            if self.versions.get(client) != version:
                self._path(client, version).unlink(missing_ok=True)
        self._saved = dict(self.versions)

    def restore(self, versions: dict[int, int]) -> None:
        """Go back to a checkpoint's versions; files of rounds that it does not know are deleted."""
        self.versions, self._saved = dict(versions), dict(versions)
        known = {self._path(client, version) for client, version in versions.items()}
        for path in self.folder.glob("*/*.safetensors"):
            if path not in known:
                path.unlink()

    def close(self) -> None:
        """Delete the folder if it was a temporary one."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Checkpoint:
    """A run between two rounds: tensors by name and plain values."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    versions: dict[int, int] = field(default_factory=dict)


class RunFolder:
    """The files of one run. Only one process at a time may write to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: Any = None

    # ---- opening ----
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "experiment.toml").exists()

    def lock(self) -> None:
        """Claim the folder for this process until it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{self.path} is in use by another process that is running there") from None

    def unlock(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(self, experiment: Experiment, environment: dict[str, Any]) -> None:
        """Start a new run here; a folder with other things in it is refused."""
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
        if others:
            raise CheckpointError(
                f"{self.path} is not a run folder and not empty (it has {others[0]!r}); choose another"
            )
        write_atomically(self.path / "environment.json", _json(environment))
        write_atomically(self.path / "experiment.toml", experiment.to_toml().encode())

    def experiment(self) -> Experiment:
        """The experiment of this run."""
        if not self.exists():
            raise CheckpointError(f"{self.path} holds no run: there is no experiment.toml in it")
        return Experiment.from_toml(self.path / "experiment.toml")

    # ---- tables ----
    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to `metrics` or `clients`."""
        with (self.path / f"{table}.jsonl").open("a") as file:
            file.write("".join(_line(row) for row in rows))

    def rows(self, table: str, until: int | None = None) -> list[dict[str, Any]]:
        """The rows of a table, up to and including round `until`."""
        return list(self._rows(table, until))

    def _rows(self, table: str, until: int | None) -> Iterator[dict[str, Any]]:
        path = self.path / f"{table}.jsonl"
        if not path.exists():
            return
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                # A kill may cut the last line short; its round is past the checkpoint and will be run again.
                if until is not None:
                    return
                raise CheckpointError(f"{path}, line {number}, is damaged; nothing was deleted") from None
            if until is None or row["round"] <= until:
                yield row

    def rewind(self, until: int) -> None:
        """Drop the rows of rounds after `until`: they will be run again."""
        for table in ("metrics", "clients"):
            rows = self.rows(table, until)
            write_atomically(self.path / f"{table}.jsonl", "".join(_line(row) for row in rows).encode())

    # ---- checkpoints ----
    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint. The JSON file is renamed last and names the tensors' file with its checksum."""
        blob = save({name: t.contiguous() for name, t in checkpoint.tensors.items()})
        name = f"checkpoint-{checkpoint.plain['round']:06d}.safetensors"
        write_atomically(self.path / name, blob)
        plain = checkpoint.plain | {
            "tensors": name,
            "sha256": hashlib.sha256(blob).hexdigest(),
            "client_versions": {str(k): v for k, v in checkpoint.versions.items()},
        }
        write_atomically(self.path / "checkpoint.json", _json(plain))
        for old in self.path.glob("checkpoint-*.safetensors"):
            if old.name != name:
                old.unlink()

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint; None if the run was stopped before its first."""
        path = self.path / "checkpoint.json"
        if not path.exists():
            return None
        try:
            plain = json.loads(path.read_text())
            tensors, checksum = self.path / plain.pop("tensors"), plain.pop("sha256")
            versions = {int(k): int(v) for k, v in plain.pop("client_versions").items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
        with contextlib.suppress(FileNotFoundError):
            if hashlib.sha256(tensors.read_bytes()).hexdigest() != checksum:
                raise CheckpointError(
                    f"{tensors} is damaged (its checksum is not the recorded one); nothing was deleted"
                )
        return Checkpoint(read_tensors(tensors), plain, versions)

    def save_weights(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        """Write a model as `name`.safetensors, loadable with `load_state_dict`."""
        copies = {key: t.detach().contiguous().clone() for key, t in tensors.items()}
        write_atomically(self.path / f"{name}.safetensors", save(copies, metadata))


def describe_environment() -> dict[str, Any]:
    """Versions and hardware, for whoever wants to repeat the run."""
    return {
        "fedflat": _version("fedflat"),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _line(row: dict[str, Any]) -> str:
    """A row as JSON, which has no word for numbers that are not finite."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain) + "\n"


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
