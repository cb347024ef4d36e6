"""Checks of what parts and losses return, so that a mistake is told by the name of the part and the slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedflat.errors import InputError, PartError


def vector_like(value: Any, like: Tensor, part: str, slot: str) -> Tensor:
    """`value`, which must be a tensor of the shape of `like`."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise PartError(
            f"the slot {slot} of the part {part!r} must return a tensor of shape {tuple(like.shape)}, not "
            f"{_told(value)}"
        )
    return value


def check_states(states: Mapping[str, Any], where: str) -> None:
    """Refuse a state, {part: {name: tensor}}, that holds anything but tensors."""
    for part, state in states.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise PartError(
                    f"the part {part!r} keeps {name!r} in {where}, which holds tensors only, not {_told(value)}: write "
                    f"torch.tensor(…)"
                )


def one_number(loss: Any) -> Tensor:
    """`loss`, which must be a tensor with one number."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise InputError(
            f"the loss must return one number, the mean over the batch, not {_told(loss)}: use reduction='mean', or "
            ".mean()"
        )
    return loss


def _told(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
