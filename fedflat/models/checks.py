"""Checks of what a network is given, its input's shape and its options; errors say the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from fedflat.errors import InputError, UnknownNameError


def image_shape(model: str, shape: tuple[int, ...], minimum: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of one input, or an `InputError` that names `model` and what to do.

    minimum: the smallest height and width that leaves the network at least one pixel.

    >>> image_shape("cnn64", (3, 32, 32), minimum=16)
    (3, 32, 32)
    """
    _check_sizes(model, shape)
    if len(shape) != 3:
        raise InputError(
            f"model {model!r} takes images of shape (channels, height, width), got {tuple(shape)}: "
            "use 'mlp' or 'logistic' for other inputs"
        )
    channels, height, width = shape
    if min(height, width) < minimum:
        raise InputError(
            f"model {model!r} needs images of at least {minimum}×{minimum}, got {height}×{width}: "
            "enlarge the images, or use a smaller network ('mlp', 'logistic')"
        )
    return channels, height, width


def flat_size(model: str, shape: tuple[int, ...]) -> int:
    """The number of entries of one input, whatever its shape.

    >>> flat_size("logistic", (1, 28, 28))
    784
    """
    _check_sizes(model, shape)
    size = 1
    for length in shape:
        size *= length
    return size


def whole(model: str, field: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number from `least` on, or an `InputError` naming the model's field."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"model {model!r}: {field} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def one_of(model: str, field: str, value: Any, known: Iterable[str]) -> str:
    """`value` if it is among `known`, or an `InputError` that offers the nearest."""
    known = tuple(known)
    if value not in known:
        raise UnknownNameError(f"{field} of model {model!r}:", str(value), known)
    return str(value)


def _check_sizes(model: str, shape: tuple[int, ...]) -> None:
    if not shape or any(length < 1 for length in shape):
        raise InputError(
            f"model {model!r} needs the shape of one input without the batch, as (3, 32, 32); got {shape!r}"
        )
