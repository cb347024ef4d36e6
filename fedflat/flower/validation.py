"""What travels, tensors and plain values, and what is asked of it on arrival."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedflat.experiment import IRRELEVANT, Experiment

HEADER = 4096  # bytes that the serialised form of an array may have beyond its numbers
LARGEST = 1e12  # of any number in a tensor: no weight, statistic or message of training is near it
MOST = 1 << 53  # beyond which not every whole number is a float
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


class RefusedError(Exception):
    """What arrived is not what was expected; the text completes "client 3 …"."""


@dataclass(frozen=True)
class Form:
    """The tensors that a message may have, by name, and which of them may be missing."""

    kinds: Mapping[str, Kind]
    optional: frozenset[str] = frozenset()


def kind_of(tensor: Tensor) -> Kind:
    """Shape and type."""
    return tuple(tensor.shape), tensor.dtype


def form_of(*messages: Mapping[str, Tensor]) -> Form:
    """The form that all of some messages have; what only some of them hold is optional."""
    kinds = {name: kind_of(tensor) for message in messages for name, tensor in message.items()}
    return Form(kinds, frozenset(name for name in kinds if any(name not in message for message in messages)))


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as a record."""
    return ArrayRecord({name: Array(tensor.detach().contiguous().numpy()) for name, tensor in tensors.items()})


def tensors(content: RecordDict, name: str, form: Form | None = None) -> dict[str, Tensor]:
    """The tensors of a record, which are of this form and no others. form: None takes what comes from one's server."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"sent no tensors {name!r}")
    if form is None:
        return {key: torch.from_numpy(array.numpy()).clone() for key, array in record.items()}
    unknown = sorted(set(record) - set(form.kinds))
    missing = sorted(set(form.kinds) - set(record) - form.optional)
    if unknown or missing:
        raise RefusedError(f"sent {printable(unknown[0])}, unasked" if unknown else f"did not send {missing[0]!r}")
    return {key: _tensor(key, array, *form.kinds[key]) for key, array in record.items()}


def _tensor(name: str, array: Array, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode an array only if it says, and turns out, to be what is expected; copied to where PyTorch puts tensors."""
    wanted = torch.empty(0, dtype=dtype).numpy().dtype
    claimed = tuple(array.shape), array.dtype
    if claimed != (shape, str(wanted)) or len(array.data) > math.prod(shape) * wanted.itemsize + HEADER:
        raise RefusedError(f"sent {name!r} as {printable(claimed)}, not {shape} {wanted}")
    try:
        decoded: Any = array.numpy()
    except Exception as error:  # whatever the bytes of a stranger make the decoder say
        raise RefusedError(f"sent {name!r} in a form that cannot be read: {printable(error)}") from None
    if not isinstance(decoded, np.ndarray) or decoded.shape != shape or decoded.dtype != wanted:
        raise RefusedError(f"sent something else under the name of {name!r}")
    return torch.from_numpy(decoded).clone(memory_format=torch.contiguous_format)


def check_range(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Refuse what is not finite, or is beyond `LARGEST`.

    Args:
        name: What to call the tensor.
        tensor: What was sent.
        like: Where the tensor has the very same number as this one, any is fine (a mask of −∞, as received).
    """
    fine = tensor.abs() <= LARGEST  # false for what is not finite
    if not bool((fine if like is None else fine | (tensor == like)).all()):
        kind = f"beyond ±{LARGEST:g}" if bool(torch.isfinite(tensor).all()) else "that are not finite"
        raise RefusedError(f"sent {name!r} with numbers {kind}")


def values(content: RecordDict, name: str) -> ConfigRecord:
    """A record of plain values."""
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise RefusedError(f"sent no values {name!r}")
    return record


def whole(record: ConfigRecord, name: str, low: int = 0, high: int = MOST) -> int:
    """A whole number between two bounds."""
    value = record.get(name)
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"sent {name}={printable(value)}, no whole number from {low} to {high}")
    return value


def real(record: ConfigRecord, name: str, low: float = -LARGEST, high: float = LARGEST, *, nan: bool = False) -> float:
    """A number between two bounds. nan: or none, which is written so."""
    value = record.get(name)
    if type(value) is not float or not (low <= value <= high or (nan and math.isnan(value))):
        raise RefusedError(f"sent {name}={printable(value)}, no number from {low:g} to {high:g}")
    return value


def text(record: ConfigRecord, name: str) -> str:
    """A short text, with nothing in it that a terminal or a log would obey."""
    value = record.get(name)
    if not isinstance(value, str):
        raise RefusedError(f"sent no text {name!r}")
    return printable(value, quoted=False)


def printable(value: object, *, quoted: bool = True) -> str:
    """What a stranger sent, cut short and made harmless."""
    shown = repr(value) if quoted else str(value)
    return "".join(c if c.isprintable() else " " for c in shown)[:200]


def fingerprint(experiment: Experiment) -> str:
    """A hash of all that determines a result: two machines with the same one run the same experiment."""
    fields = {name: value for name, value in experiment.to_dict().items() if name not in IRRELEVANT}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
