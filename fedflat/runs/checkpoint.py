"""Checkpoints: an index in JSON, which ends with a checksum of itself, and a file of tensors that it names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from fedflat.errors import CheckpointError
from fedflat.experiment import IRRELEVANT, Experiment
from fedflat.runs.files import metadata_of, pack_tensors, read_tensors, write_atomically

NEWEST, PREVIOUS = "checkpoint.json", "checkpoint-previous.json"
END = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n}\n\Z')
PIECE = 10_000  # versions of client states that are converted to JSON at a time


def identity(experiment: Experiment, inputs: Mapping[str, Any]) -> str:
    """What tells the files of a run from those of another: a hash of the experiment, the data and the model."""
    fields = {name: value for name, value in experiment.to_dict().items() if name not in IRRELEVANT}
    return hashlib.sha256(json.dumps([fields, inputs], sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Checkpoint:
    """The saved state of a run between two rounds.

    Attributes:
        tensors: The server's tensors by name.
        plain: Values that JSON can hold; "round" among them.
        versions: Client → version (round) of its saved state.
        run: See `identity`.
        mark: How far the tables belong to it; see `TableFiles`.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    versions: Mapping[int, int] = field(default_factory=dict)
    run: str = ""
    mark: Mapping[str, list[int]] = field(default_factory=dict)


class Checkpoints:
    """The last two checkpoints in a folder. The older one serves where the newer one is damaged or ahead of a table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sound: int | None = None  # the round of checkpoint.json, if this process has written or verified it

    def save(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint; the one before it stays. What is older is deleted."""
        round = checkpoint.plain["round"]
        blob = pack_tensors(checkpoint.tensors, {"run": checkpoint.run, "round": str(round)})
        write_atomically(self._tensors(round), blob)
        plain = checkpoint.plain | {"run": checkpoint.run, "tensors_sha256": hashlib.sha256(blob).hexdigest()}
        if self.sound not in (None, round):
            write_atomically(self._folder / PREVIOUS, (self._folder / NEWEST).read_bytes())
        write_atomically(self._folder / NEWEST, _index(plain, checkpoint.versions))
        self.sound = round
        self.tidy(checkpoint.run)

    def load(self, name: str = NEWEST) -> Checkpoint | None:
        """One of the two checkpoints, verified; None if there is none."""
        path = self._folder / name
        try:
            plain, versions = _parsed(path.read_bytes())
            round, checksum, run = int(plain["round"]), plain.pop("tensors_sha256"), plain.pop("run")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); nothing was deleted") from None
        tensors = self._tensors(round)
        with contextlib.suppress(FileNotFoundError):
            if hashlib.sha256(tensors.read_bytes()).hexdigest() != checksum:
                raise CheckpointError(
                    f"{tensors} is damaged (its checksum differs from the recorded one); nothing was deleted"
                )
        return Checkpoint(read_tensors(tensors), plain, versions, run)

    def tidy(self, run: str) -> None:
        """Delete the tensors of this run that no sound checkpoint names; files of other runs are left alone."""
        named = set()
        for name in (NEWEST, PREVIOUS):
            with contextlib.suppress(FileNotFoundError):
                try:
                    named.add(self._tensors(int(_parsed((self._folder / name).read_bytes())[0]["round"])))
                except (OSError, ValueError, KeyError, TypeError):
                    return  # which tensors belong to a damaged index is not known
        for old in self._folder.glob("checkpoint-[0-9]*.safetensors"):
            if old not in named and metadata_of(old).get("run") == run:
                old.unlink()

    def _tensors(self, round: int) -> Path:
        return self._folder / f"checkpoint-{round:06d}.safetensors"


def _index(plain: dict[str, Any], versions: Mapping[int, int]) -> bytes:
    """A checkpoint as JSON. Millions of versions are converted in pieces, which needs less memory."""
    items, pieces = iter(versions.items()), list[str]()
    while some := dict(islice(items, PIECE)):
        pieces.append(json.dumps(some)[1:-1])
    head = json.dumps(plain | {"client_versions": {}}, indent=1).removesuffix("}\n}")
    body = (head + ", ".join(pieces) + "}").encode()
    return body + f',\n "checksum": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _parsed(content: bytes) -> tuple[dict[str, Any], dict[int, int]]:
    end = END.search(content)
    if end is None:
        raise ValueError("it is incomplete")
    if hashlib.sha256(content[: end.start()]).hexdigest().encode() != end[1]:
        raise ValueError("its checksum differs from the recorded one")
    plain = json.loads(content)
    plain.pop("checksum")
    return plain, {int(k): int(v) for k, v in plain.pop("client_versions").items()}
