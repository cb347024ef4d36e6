"""`Experiment`: everything that determines a result, as one frozen dataclass.

A TOML file and the command line are two views of it. This module must not import torch: `--help` reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedflat.errors import InputError, UnknownNameError
from fedflat.words import printable, shortened

IRRELEVANT = ("workers", "backend", "device", "data_share")  # fields that do not change a result


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Experiment:
    """One federated experiment. Fields with the papers' symbols mean what the papers mean by them.

    `method`, `model`, `data`, `loss` and `partition` are strings such as `"feddc(alpha=0.01)+man"`; see `fedflat list`.
    """

    data: str = _field("cifar10", "data set; see `fedflat list data`")
    partition: str = _field("dirichlet_equal(delta=0.3)", "how the samples are divided among the clients")
    clients: int = _field(100, "number of clients, N")
    participation: str = _field(
        "auto",
        "who trains: all, uniform(m), bernoulli(q), power_of_choice(m, d); auto: bernoulli(0.1) for built-in data, all "
        "for your own clients",
    )
    model: str = _field("cnn64", "network; see `fedflat list models`")
    weights: str | None = _field(None, "file of weights to start from, .safetensors or .pt; none: drawn by the seed")
    loss: str = _field("auto", "loss: auto (what the data need), cross_entropy, ohem(share), mse or bce")
    method: str = _field("fedavg", "sum of parts; see `fedflat list methods`")
    rounds: int = _field(500, "communication rounds, T")
    local_epochs: int = _field(5, "passes over a client's data per round, E")
    local_steps: int | None = _field(None, "local steps per round, K; replaces local_epochs")
    batch_size: int = _field(50, "minibatch size, B; 0: all data of the client")
    microbatch: int | None = _field(
        None, "samples per forward pass; the gradients of a minibatch are added up; none: all of them at once"
    )
    drop_last: bool = _field(False, "leave out the last, smaller minibatch of an epoch")
    optimizer: str = _field("sgd", "clients' optimiser: sgd, adam, adamw …; see `fedflat list optimizers`")
    lr: float = _field(0.1, "clients' learning rate in the first round")
    lr_schedule: str = _field(
        "decay", "how lr changes: decay (lr_decay per round), constant, cosine, warmup, poly; or a sum"
    )
    lr_decay: float = _field(0.998, "factor by which the schedule decay changes the learning rate per round")
    momentum: float = _field(0.0, "momentum of sgd; reset to zero in every round")
    nesterov: bool = _field(False, "Nesterov's form of the momentum")
    weight_decay: float = _field(1e-3, "L2 penalty, added to the gradient of every trainable parameter")
    clip: float | None = _field(10.0, "largest norm of the gradient; none: no clipping")
    server_lr: float = _field(1.0, "server's learning rate; multiplies the combined update")
    weighting: str = _field("auto", "auto (what the method needs), samples or uniform")
    augment: str = _field("auto", "preprocessing: auto, none, paper000, paper001, paper003 or paper004")
    local_holdout: float = _field(0.0, "fraction of every client's data kept as its own test set")
    evaluated: str = _field("auto", "weights to evaluate: auto, server, selected, all or averaged")
    evaluate_every: int = _field(1, "rounds between evaluations; the last round is always evaluated; 0: only the last")
    evaluate_clients: int | None = _field(
        0, "rounds between evaluations of every client on its own test data; 0: only after the last; none: never"
    )
    new_clients: int = _field(0, "number of clients (the last ones) that never train and are only evaluated")
    batchnorm: str = _field("average", "BatchNorm: average, local (FedBN), silobn, silobn_by_domain or recompute")
    head: str | None = _field(None, "name of the classifier; none: the last Linear layer")
    features: str | None = _field(None, "module whose output is used as features; none: the head's input")
    last_stage: str | None = _field(None, "name of the model's last block, if the model does not declare it")
    dtype: str = _field("float32", "type of weights and data: float32 or float64")
    precision: str = _field("float32", "type in which layers compute: float32, bfloat16, or tf32 on CUDA")
    compile: str = _field(
        "none",
        "torch.compile of the network: none, default, reduce-overhead (CUDA graphs); not measured on a GPU by us",
    )
    seed: int = _field(0, "random seed; a draw depends only on it, the draw's purpose, the round and the client")
    stack: int | Literal["auto"] = _field(
        1, "clients that a worker trains at once, as rows of one computation; auto: as many as are fastest"
    )
    backend: str = _field("pool", "where clients train: pool (processes), serial (this process) or ray (a cluster)")
    device: str = _field("auto", "cpu, cuda, cuda:1, mps, or several: cuda:0,cuda:1; auto: cuda if there is one")
    data_share: float = _field(0.5, "share of a device's memory that data may take; 0: they stay in the host's memory")
    workers: int | None = _field(None, "worker processes per device; none: one, on the CPU one per core")

    def __new__(cls, *args: Any, **kwargs: Any) -> Experiment:
        """Refuse an unknown field and suggest the nearest known name."""
        check_names(kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, coerce(spec.name, getattr(self, spec.name)))
        self._check_numbers()
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UnknownNameError(name, str(getattr(self, name)), allowed)

    def _check_numbers(self) -> None:
        for name, low, high, strict in RANGES:
            value = getattr(self, name)
            inside = (
                value is None
                or value == "auto"
                or (-INF < value < INF and (low < value if strict else low <= value) and value <= high)
            )
            if not inside:
                bound = f"{'above' if strict else 'at least'} {low:g}" + (
                    f" and at most {high:g}" if high < math.inf else ""
                )
                raise InputError(f"{name} must be a finite number, {bound}, not {shortened(value)}")
        if self.momentum >= 1:
            raise InputError(f"momentum must be below 1, not {self.momentum}")
        if self.dtype == "float64" and self.precision != "float32":
            raise InputError("dtype='float64' computes in double precision throughout: leave precision at 'float32'")
        if self.precision == "float16":
            reason = "precision='float16' needs its losses scaled, and steps left out where a gradient overflows"
            raise InputError(f"{reason}, which would change the methods: use 'bfloat16', which has float32's range")
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs a momentum above 0")

    def replace(self, **changes: Any) -> Experiment:
        """A copy with some fields changed."""
        check_names(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Experiment:
        """The inverse of `to_dict`; fields left out keep their defaults."""
        check_names(values)
        return cls(**values)

    def to_toml(self) -> str:
        """The experiment as TOML. A field that is None is written as the string "none"."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items())

    @classmethod
    def from_toml(cls, path: str | Path) -> Experiment:
        """Read a TOML file of fields."""
        try:
            return cls.from_dict(read_toml(path))
        except InputError as error:
            raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None

    def differences(self, other: Experiment) -> list[str]:
        """Descriptions of the fields that differ and can change a result."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{name}: {theirs[name]!r} there, {mine[name]!r} here"
            for name in mine
            if name not in IRRELEVANT and mine[name] != theirs[name]
        ]


CHOICES = {
    "backend": ("pool", "serial", "ray"),
    "weighting": ("auto", "samples", "uniform"),
    "evaluated": ("auto", "server", "selected", "all", "averaged"),
    "batchnorm": ("average", "local", "silobn", "silobn_by_domain", "recompute"),
    "dtype": ("float32", "float64"),
    "precision": ("float32", "bfloat16", "tf32"),
    "compile": ("none", "default", "reduce-overhead"),
    "augment": ("auto", "none", "paper000", "paper001", "paper003", "paper004"),
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
INF = math.inf
RANGES = [  # name, lowest, highest, whether the lowest is excluded
    ("clients", 1, INF, False),
    ("rounds", 1, INF, False),
    ("local_epochs", 0, INF, False),
    ("local_steps", 0, INF, False),
    ("batch_size", 0, INF, False),
    ("microbatch", 1, INF, False),
    ("lr", 0, INF, False),
    ("lr_decay", 0, INF, True),
    ("momentum", 0, 1, False),
    ("weight_decay", 0, INF, False),
    ("clip", 0, INF, True),
    ("server_lr", 0, INF, False),
    ("local_holdout", 0, 0.9, False),
    ("evaluate_every", 0, INF, False),
    ("evaluate_clients", 0, INF, False),
    ("new_clients", 0, INF, False),
    ("data_share", 0, 1, False),
    ("workers", 1, INF, False),
    ("stack", 1, INF, False),
]


def check_names(values: dict[str, Any]) -> None:
    """Refuse names that are not fields of `Experiment`."""
    known = [spec.name for spec in fields(Experiment)]
    for name in values:
        if name not in known:
            raise UnknownNameError("field", name, known)


@cache
def field_type(name: str) -> tuple[type, bool]:
    """The plain type of a field and whether it may be None."""
    options = _options(name)
    plain = next(each for each in options if isinstance(each, type) and each is not types.NoneType)
    return plain, types.NoneType in options


@cache
def field_words(name: str) -> tuple[str, ...]:
    """The words that a field takes beside values of its type, such as "auto"."""
    return tuple(word for each in _options(name) for word in typing.get_args(each))


def _options(name: str) -> tuple[Any, ...]:
    hint = typing.get_type_hints(Experiment)[name]
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def coerce(name: str, value: Any) -> Any:
    """Convert `value`, possibly text from the command line, to the type of the field `name`."""
    kind, optional = field_type(name)
    if optional and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    if kind is str or (isinstance(value, str) and value in field_words(name)):
        return _readable(name, str(value))
    try:
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if kind is float and not isinstance(value, bool):
            return float(value)
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        what = " or ".join([KINDS[kind], *map(repr, field_words(name))])
        raise InputError(f"{name} takes {what}, not {shortened(value)}") from None


def _readable(name: str, text: str) -> str:
    """Refuse control characters, which no name has and which a terminal would obey."""
    if text != printable(text):
        raise InputError(f"{name} holds characters that cannot be printed: {text!r}")
    return text


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file. A file that cannot be read is an `InputError` on one line."""
    try:
        return tomllib.loads(Path(path).read_bytes().decode())  # TOML is always UTF-8
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # other JSON strings are valid TOML
    return repr(value)


def default_out(experiment: Experiment) -> Path:
    """A readable folder name under `runs/`, different for every experiment.

    It ends in a hash of the fields that differ from their defaults and can change a result.
    """
    changed = {
        spec.name: getattr(experiment, spec.name)
        for spec in fields(experiment)
        if spec.name not in IRRELEVANT and getattr(experiment, spec.name) != spec.default
    }
    name = f"{slug(experiment.method)}-{slug(experiment.data)}-s{experiment.seed}-{digest(changed)}"
    return Path("runs") / name


def digest(values: object) -> str:
    """A hash of plain values, six characters long."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def slug(text: str) -> str:
    """Text as part of a file name: `"feddc(alpha=0.01)+man"` becomes `"feddc-alpha0.01-man"`."""
    return re.sub(r"[^\w.]+", "-", text.replace("=", "")).strip("-.")[:48]
