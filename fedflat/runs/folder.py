"""The run folder: experiment, tables, checkpoints. TOML, JSON and safetensors only; nothing is pickled."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import CheckpointError, FolderInUseError
from fedflat.experiment import Experiment
from fedflat.runs.checkpoint import NEWEST, PREVIOUS, Checkpoint, Checkpoints
from fedflat.runs.files import pack_tensors, read_tensors, write_atomically
from fedflat.runs.locks import claim
from fedflat.runs.tables import TABLES, TableFiles

PATIENCE = 20  # tenths of a second to wait for the lock of a run folder
ABANDONED = re.compile(r"\.([a-z]+\.(toml|jsonl?)|(model|best|pictures|checkpoint-\w+|\d+\.\d+)\.\w+)\.\d+\.tmp")
log = logging.getLogger(__name__)


class RunFolder:
    """The folder with the files of one run. Only one process at a time may write to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: Any = None
        self.tables, self.checkpoints = TableFiles(self.path), Checkpoints(self.path)

    # ---- opening ----
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "experiment.toml").exists()

    def lock(self) -> None:
        """Lock the folder for this process until it calls `unlock` or ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be a run folder: {error}") from None
        for attempt in range(PATIENCE + 1):  # the workers of a killed run keep the lock for a moment
            try:
                return claim(self._lock)
            except OSError:
                time.sleep(0.1 if attempt < PATIENCE else 0)
        raise FolderInUseError(f"{self.path} is in use by another process; wait for it to end, or stop it")

    @property
    def in_use(self) -> bool:
        """Whether another process has the lock now."""
        with contextlib.suppress(OSError), (self.path / ".lock").open("r+") as file:
            try:
                claim(file)
            except OSError:
                return True
        return False

    def unlock(self) -> None:
        """Release the folder for other processes."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(self, experiment: Experiment, environment: dict[str, Any], partition: dict[str, Any]) -> None:
        """Start a new run here; see `record`. Raises `CheckpointError` if the folder contains other files."""
        ours = ("environment.json", "partition.json")  # left by a process that was killed inside `record`
        others = [p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name not in ours]
        if others:
            raise CheckpointError(
                f"{self.path} is not a run folder and not empty (it contains {others[0]!r}); choose another folder"
            )
        self._sweep()
        self.record(experiment, environment, partition)

    def record(self, experiment: Experiment, environment: dict[str, Any], partition: dict[str, Any]) -> None:
        """Write the experiment, the environment and the partition (see `partition_record`; {} if unknown)."""
        write_atomically(self.path / "environment.json", _json(environment))
        write_atomically(self.path / "partition.json", (json.dumps(partition) + "\n").encode())
        inputs = environment.get("inputs", {})
        own = [name for name in ("data", "model") if inputs.get(f"custom_{name}")]
        note = f"# Your own {' and '.join(own)}: give fedflat.run the same again to repeat the run.\n" if own else ""
        write_atomically(self.path / "experiment.toml", (note + experiment.to_toml()).encode())

    def experiment(self) -> Experiment:
        """The experiment of this run."""
        if not self.exists():
            raise CheckpointError(f"{self.path} holds no run: there is no experiment.toml in it")
        return Experiment.from_toml(self.path / "experiment.toml")

    # ---- tables and checkpoints ----
    def append(self, table: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows to one of `TABLES`."""
        self.tables.append(table, rows)

    def rows(self, table: str, until: int) -> list[dict[str, Any]]:
        """The rows of a table up to and including round `until`."""
        return self.tables.rows(table, until)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint to which the rows so far belong; see `Checkpoints.save`."""
        plain = checkpoint.plain | {"tables": self.tables.mark()}
        self.checkpoints.save(replace(checkpoint, plain=plain))

    def load_checkpoint(self, name: str = NEWEST) -> Checkpoint | None:
        """The last checkpoint, or the one before it, with the tables verified; None if there is none."""
        checkpoint = self.checkpoints.load(name)
        if checkpoint is not None:
            try:
                mark = checkpoint.plain.pop("tables")
                checkpoint.mark = {table: [int(number) for number in mark[table]] for table in TABLES}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{self.path / name} is damaged ({error}); nothing was deleted") from None
            self.tables.check(checkpoint.mark)
        return checkpoint

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, sound or not."""
        return any((self.path / name).exists() for name in (NEWEST, PREVIOUS))

    def resumable(self, check: Callable[[Checkpoint, Checkpoint | None], None]) -> list[Checkpoint]:
        """The checkpoint to continue from, and the one before it if there is one; empty if there is none.

        It is the newest that is whole, that the tables cover and that `check`, given it and the one before, accepts.

        Raises:
            CheckpointError: There are checkpoints, but none can be used. Nothing was deleted.
        """
        found, failures = list[Checkpoint](), list[CheckpointError]()
        for name in (PREVIOUS, NEWEST):
            try:
                checkpoint = self.load_checkpoint(name)
                if checkpoint is not None:
                    check(checkpoint, found[0] if found else None)
                    found.insert(0, checkpoint)
                    self.checkpoints.sound = checkpoint.plain["round"] if name == NEWEST else None
            except CheckpointError as error:
                failures.append(error)
        if failures and not found:
            raise failures[-1]
        for failure in failures:
            log.warning("%s; continuing from round %d", failure, found[0].plain["round"])
        return found

    def tidy(self, run: str) -> None:
        """Delete what a process of this run left behind when it was killed: half-written files, old tensors."""
        self._sweep()
        self.checkpoints.tidy(run)

    def _sweep(self) -> None:
        for abandoned in self.path.rglob(".*.tmp"):
            if ABANDONED.fullmatch(abandoned.name):
                abandoned.unlink(missing_ok=True)

    def save_weights(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        """Write the state dict of a model to `name`.safetensors, with `about` in its metadata."""
        write_atomically(self.path / f"{name}.safetensors", pack_tensors(tensors, about))

    def has_weights(self, name: str, about: Mapping[str, str]) -> bool:
        """Whether `name`.safetensors is there, whole, and about this."""
        try:
            return bool(read_tensors(self.path / f"{name}.safetensors", about))
        except CheckpointError:
            return False


def describe_environment() -> dict[str, Any]:
    """The versions of the software and the hardware, for those who want to repeat the run."""
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


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
