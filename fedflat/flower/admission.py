"""Who may join and with what: the server's list of clients, `clients.toml` of a project."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord

from fedflat.data import Federation
from fedflat.errors import InputError
from fedflat.flower.data_summary import DataSummary, classes_of, kind, sample_kinds, test_of
from fedflat.flower.identity import public_text, read_public
from fedflat.flower.validation import Kind, RefusedError

MAX_WEIGHT = 2.0


@dataclass(frozen=True)
class Admission:
    """What the server knows of its clients before they join. What is None or missing is not known.

    Attributes:
        classes: Number of classes; no client can raise it.
        x, y: Shape and type of one input and of one target.
        max_weight: A size that only its client states counts as at most so many times the median of all sizes.
        keys: Public keys, in OpenSSH's form, by client. A client that is not there is bound to the key with
            which it first joins.
        samples: Numbers of training samples by client. Who states another one is refused.
    """

    classes: int | None = None
    x: Kind | None = None
    y: Kind | None = None
    max_weight: float = MAX_WEIGHT
    keys: Mapping[int, str] = field(default_factory=dict)
    samples: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.max_weight >= 1:
            raise InputError(f"max_weight must be at least 1, got {self.max_weight!r}")
        if len(set(self.keys.values())) < len(self.keys):
            raise InputError("two clients have the same key: every client needs one of its own")

    @classmethod
    def read(cls, path: Path) -> Admission:
        """The list in a TOML file; see `text`."""
        try:
            return cls._parsed(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, RefusedError, InputError) as error:
            raise InputError(f"{path} is no list of clients: {error}") from None

    @classmethod
    def _parsed(cls, plain: dict[str, Any]) -> Admission:
        clients = {int(number): entry for number, entry in plain.pop("client", {}).items()}
        x, y = _kind(plain, "x"), _kind(plain, "y")
        for where, entry, known in [("", plain, {"classes", "max_weight"}), *_entries(clients)]:
            for name in set(entry) - known:
                raise InputError(f"{where}{name} is not known; known are {', '.join(sorted(known))}")
        for name, low in (("classes", 1), ("max_weight", 1)):
            if name in plain and not (isinstance(plain[name], int | float) and plain[name] >= low):
                raise InputError(f"{name} must be at least {low}, got {plain[name]!r}")
        keys = {n: public_text(read_public(entry["key"])) for n, entry in clients.items() if "key" in entry}
        samples = {n: int(entry["samples"]) for n, entry in clients.items() if "samples" in entry}
        return cls(**plain, x=x, y=y, keys=keys, samples=samples)

    def text(self) -> str:
        """As TOML."""
        lines = [f"classes = {self.classes}"] if self.classes else []
        for name, known in (("x", self.x), ("y", self.y)):
            if known is not None:
                shape, dtype = known
                lines += [f"{name}_shape = {list(shape)}", f'{name}_type = "{str(dtype).removeprefix("torch.")}"']
        lines.append(f"max_weight = {self.max_weight}")
        for number in sorted({*self.keys, *self.samples}):
            lines += ["", f"[client.{number}]"]
            lines += [f'key = "{self.keys[number]}"'] if number in self.keys else []
            lines += [f"samples = {self.samples[number]}"] if number in self.samples else []
        return "\n".join(lines) + "\n"

    def completed(self, test: Any, dtype: str) -> Admission:
        """With what a common test set tells of classes and forms, where the list does not say it."""
        if test_of(test) is None or (self.classes and self.x and self.y):
            return self
        x, y = sample_kinds(test, dtype)
        return replace(self, classes=self.classes or classes_of(test) or None, x=self.x or x, y=self.y or y)

    def expected(self, client: int) -> DataSummary | None:
        """What the list says of a client's data, if it says all that the server must know."""
        if client not in self.samples or self.x is None or self.y is None:
            return None
        return DataSummary(self.samples[client], 0, self.x, self.y, self.classes or 0)

    def check(self, client: int, key: str, summary: DataSummary) -> None:
        """Refuse another key than the client's, another size, another form or more classes than there are."""
        if self.keys.get(client, key) != key:
            raise RefusedError(f"says it is client {client}, and has not the key of that client")
        if client not in self.keys and key in self.keys.values():
            raise RefusedError(f"says it is client {client}, and has the key of another client")
        wanted = self.samples.get(client, summary.samples)
        if summary.samples != wanted:
            raise RefusedError(
                f"says, as client {client}, that it has {summary.samples} samples, and must have {wanted}"
            )
        if self.classes and summary.classes > self.classes:
            raise RefusedError(f"says, as client {client}, that it has {summary.classes} classes of {self.classes}")
        for name, known, told in (("inputs", self.x, summary.x), ("targets", self.y, summary.y)):
            if known is not None and told != known:
                raise RefusedError(f"has, as client {client}, {name} of the form {told}, and not {known}")

    def counted(self, told: Mapping[int, DataSummary]) -> dict[int, int]:
        """The sizes that count, by client: as listed, or as told up to `max_weight` medians."""
        most = int(self.max_weight * statistics.median_low(one.samples for one in told.values()))
        return {i: one.samples if i in self.samples else min(one.samples, most) for i, one in told.items()}


def _entries(clients: Mapping[int, dict[str, Any]]) -> list[tuple[str, dict[str, Any], set[str]]]:
    return [(f"client.{number}.", entry, {"key", "samples"}) for number, entry in clients.items()]


def _kind(plain: dict[str, Any], name: str) -> Kind | None:
    shape, dtype = plain.pop(f"{name}_shape", None), plain.pop(f"{name}_type", None)
    if shape is None and dtype is None:
        return None
    return kind(ConfigRecord({f"{name}_shape": shape, f"{name}_type": dtype}), name)


def admission_of(keys: Mapping[int, str], federation: Federation | None, clients: int, dtype: str) -> Admission:
    """The list for a trial. federation: that of the experiment, where it can be read on this machine."""
    if federation is None:
        return Admission(keys=keys)
    first = Federation([federation.samples(0)], classes=federation.classes, preprocess=federation.preprocess)
    summary = DataSummary.of(first, 0, dtype)
    sizes = {client: federation.size(client) for client in range(clients)}
    return Admission(summary.classes or None, summary.x, summary.y, keys=keys, samples=sizes)
