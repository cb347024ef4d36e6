"""Weights from a file, as the start of a run: strict about names and shapes, with a word about what matched."""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedflat.errors import DataError, InputError, nearest

log = logging.getLogger(__name__)
PREFIXES = ("module.", "model.", "_orig_mod.")  # what wrappers put in front of all names


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Copy the weights in a file to a module.

    A head for another number of classes keeps its own weights, and a warning says so; every other difference of names
    or shapes is an error.

    Args:
        module: Changed in place.
        path: A .safetensors file, or a .pt or .pth file of a state dict, of which only tensors are read.
    """
    found, own = _named(_read(Path(path).expanduser()), module), module.state_dict()
    head = _head(module)
    other = {name for name in own if name in found and found[name].shape != own[name].shape}
    replaced = sorted(name for name in other if head and name.rpartition(".")[0] == head)
    wrong = [name for name in own if name not in found or (name in other and name not in replaced)]
    if wrong:
        raise InputError(f"{path} does not fit the model: {_why(wrong[0], own, found)} ({len(wrong)} such tensors)")
    unused = sorted(set(found) - set(own))
    if unused:
        raise InputError(f"{path} holds {unused[0]!r}, which the model does not have ({len(unused)} such tensors)")
    module.load_state_dict({name: own[name] if name in replaced else found[name] for name in own})
    if replaced:
        classes = found[replaced[0]].shape[0], own[replaced[0]].shape[0]
        log.warning("%s: the head %r has %d outputs there and %d here: it starts anew", path, head, *classes)
    log.info("%s: %d of %d tensors taken", path, len(own) - len(replaced), len(own))


def file_hash(path: str | Path) -> str:
    """A hash of the file, which records tell."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"no such file of weights: {path}") from None
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} holds no weights that can be read safely: {str(error).splitlines()[0]}") from None
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise DataError(f"{path} holds no state dict, that is tensors by name")
    return stored


def _named(found: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Without what a wrapper has put in front of all names, and without counters that the model does not have."""
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    own = module.state_dict()
    return {name: tensor for name, tensor in found.items() if name in own or not name.endswith("num_batches_tracked")}


def _head(module: nn.Module) -> str:
    """The name of the last linear layer."""
    return next((name for name, layer in reversed(list(module.named_modules())) if isinstance(layer, nn.Linear)), "")


def _why(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    if name in found:
        return f"{name!r} is {tuple(found[name].shape)} there and {tuple(own[name].shape)} here"
    near = nearest(name, found)
    return f"it has no {name!r}" + (f"; it has {near!r}" if near else "")
