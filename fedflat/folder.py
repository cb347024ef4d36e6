"""The run folder: experiment, tables, checkpoints. TOML, JSON and safetensors only; nothing is pickled."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedflat.errors import CheckpointError
from fedflat.experiment import Experiment
from fedflat.rows import read_rows
from fedflat.store import pack_tensors, read_tensors, write_atomically

PATIENCE = 20  # tenths of a second to wait for a run folder
PIECE = 10_000  # versions of client states that are written at once
TABLES = ("metrics", "clients", "evaluations")


@dataclass
class Checkpoint:
    """A run between two rounds: tensors by name and plain values."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    versions: Mapping[int, int] = field(default_factory=dict)


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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be a run folder: {error}") from None
        for attempt in range(PATIENCE + 1):  # the workers of a run that was just killed hold on for a moment
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.1 if attempt < PATIENCE else 0)
        raise CheckpointError(f"{self.path} is in use by another process that is running there")

    def unlock(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(self, experiment: Experiment, environment: dict[str, Any], partition: dict[str, Any]) -> None:
        """Start a new run here; a folder with other things in it is refused."""
        ours = ("environment.json", "partition.json")  # all there is if the process was killed in between
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name not in ours]
        if others:
            raise CheckpointError(
                f"{self.path} is not a run folder and not empty (it has {others[0]!r}); choose another"
            )
        self.tidy()
        self.record(experiment, environment, partition)

    def record(self, experiment: Experiment, environment: dict[str, Any], partition: dict[str, Any]) -> None:
        """Write down what is run, and on what. partition: who holds what, see `partition_record`; {} if unknown."""
        write_atomically(self.path / "environment.json", _json(environment))
        write_atomically(self.path / "partition.json", (json.dumps(partition) + "\n").encode())
        own = environment.get("inputs", {}).get("custom_model", False)
        note = "# The model was the user's own; data may have been, too: see environment.json.\n" if own else ""
        write_atomically(self.path / "experiment.toml", (note + experiment.to_toml()).encode())

    def experiment(self) -> Experiment:
        """The experiment of this run."""
        if not self.exists():
            raise CheckpointError(f"{self.path} holds no run: there is no experiment.toml in it")
        return Experiment.from_toml(self.path / "experiment.toml")

    # ---- tables ----
    def append(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to one of `TABLES`."""
        if not rows:
            return
        with (self.path / f"{table}.jsonl").open("a") as file:
            file.write("".join(_line(row) for row in rows))

    def rows(self, table: str, until: int) -> list[dict[str, Any]]:
        """The rows of a table, up to and including round `until`."""
        return [row for row in read_rows(self.path / f"{table}.jsonl") if row["round"] <= until]

    def rewind(self, until: int) -> None:
        """Drop the rows of rounds after `until`: they will be run again."""
        for table in TABLES:
            path = self.path / f"{table}.jsonl"
            if path.exists():
                write_atomically(path, "".join(_line(row) for row in self.rows(table, until)).encode())

    # ---- checkpoints ----
    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint. The JSON file is renamed last and names the tensors' file with its checksum."""
        blob = pack_tensors(checkpoint.tensors)
        name = f"checkpoint-{checkpoint.plain['round']:06d}.safetensors"
        write_atomically(self.path / name, blob)
        plain = checkpoint.plain | {"tensors": name, "sha256": hashlib.sha256(blob).hexdigest()}
        write_atomically(self.path / "checkpoint.json", _with_versions(plain, checkpoint.versions))
        self._delete_checkpoints_but(name)

    def tidy(self) -> None:
        """Delete what a process that was killed while writing has left behind in what is a run folder."""
        for abandoned in self.path.rglob(".*.[0-9]*.tmp"):
            abandoned.unlink(missing_ok=True)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # `load_checkpoint` will say what is wrong
            self._delete_checkpoints_but(json.loads((self.path / "checkpoint.json").read_text())["tensors"])

    def _delete_checkpoints_but(self, name: str) -> None:
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


def _with_versions(plain: dict[str, Any], versions: Mapping[int, int]) -> bytes:
    """A checkpoint as JSON. The text of millions of versions is made in pieces, so as not to fill the memory."""
    items, pieces = iter(versions.items()), list[str]()
    while some := dict(islice(items, PIECE)):
        pieces.append(json.dumps(some)[1:-1])
    head = json.dumps(plain | {"client_versions": {}}, indent=1).removesuffix("}\n}")
    return (head + ", ".join(pieces) + "}\n}\n").encode()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
