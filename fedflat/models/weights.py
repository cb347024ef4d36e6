"""Weights from a file, as the start of a run: strict about names and shapes, with a word about what matched."""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedflat.errors import DataError, InputError, nearest
from fedflat.models.foreign_names import translated

log = logging.getLogger(__name__)
PREFIXES = ("module.", "model.", "_orig_mod.")  # what wrappers put in front of all names


def load_weights(module: nn.Module, path: str | Path) -> str:
    """Copy the weights in a file to a module.

    A head for another number of classes keeps its own weights, and so do GroupNorm layers where the file has BatchNorm;
    a warning says so. Every other difference of names or shapes is an error. Files may use torchvision's or timm's
    names of ResNets and MobileNetV2.

    Args:
        module: Changed in place.
        path: A .safetensors file, or a .pt or .pth file of a state dict, of which only tensors are read.

    Returns:
        What matched, in one line.
    """
    own = module.state_dict()
    found, whose = _named(_read(Path(path).expanduser()), own)
    found, regrouped = _without_batchnorm(found, module)
    head = _head(module)
    other = {name for name in own if name in found and found[name].shape != own[name].shape}
    replaced = sorted(name for name in other if head and name.rpartition(".")[0] == head)
    wrong = [n for n in own if (n not in found and n not in regrouped) or (n in other and n not in replaced)]
    if wrong:
        raise InputError(f"{path} does not fit the model: {_why(wrong[0], own, found)} ({len(wrong)} such tensors)")
    unused = sorted(set(found) - set(own))
    if unused:
        raise InputError(f"{path} holds {unused[0]!r}, which the model does not have ({len(unused)} such tensors)")
    anew = {*replaced, *regrouped}
    module.load_state_dict({name: own[name] if name in anew else found[name] for name in own})
    report = [f"{path}: {len(own) - len(anew)} of {len(own)} tensors taken"]
    report += [f"its names are those of {whose}"] if whose else []
    if replaced:
        there, here = found[replaced[0]].shape[0], own[replaced[0]].shape[0]
        report.append(f"the head {head!r} has {there} outputs there and {here} here: it starts anew")
    if regrouped:
        report.append(f"{len(regrouped) // 2} layers are BatchNorm there and GroupNorm here: they start anew")
    log.log(logging.WARNING if anew or whose else logging.INFO, "; ".join(report))
    return "; ".join(report)


def file_hash(path: str | Path) -> str:
    """A hash of the file, which records tell."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"no such file of weights: {path}") from None
    except pickle.UnpicklingError:  # torch's own words advise to read it all the same
        raise DataError(f"{path} holds no weights that can be read safely: it is no file of tensors alone") from None
    except Exception as error:  # bytes that are no pickle raise whatever they lead to
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} holds no weights that can be read safely: {why}") from None
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise DataError(f"{path} holds no state dict, that is tensors by name")
    return stored


def _named(found: dict[str, Tensor], own: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """By our names: without what a wrapper has put in front, and without counters that the model does not have.

    Also whose names the file uses; empty for ours.
    """
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    known = None if set(own) & set(found) else translated(found)
    whose, ours = known or ("", {})
    found = {ours.get(name, name): tensor for name, tensor in found.items()}
    return {n: t for n, t in found.items() if n in own or not n.endswith("num_batches_tracked")}, whose


def _without_batchnorm(found: dict[str, Tensor], module: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Without layers that are BatchNorm in the file and GroupNorm in the model; and the model's tensors of these."""
    layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.GroupNorm)]
    other = {layer for layer in layers if f"{layer}.running_mean" in found}
    kept = {name: tensor for name, tensor in found.items() if name.rpartition(".")[0] not in other}
    return kept, {f"{layer}.{tensor}" for layer in other for tensor in ("weight", "bias")}


def _head(module: nn.Module) -> str:
    """The name of the last linear layer."""
    return next((name for name, layer in reversed(list(module.named_modules())) if isinstance(layer, nn.Linear)), "")


def _why(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    if name in found:
        return f"{name!r} is {tuple(found[name].shape)} there and {tuple(own[name].shape)} here"
    near = nearest(name, found)
    return f"it has no {name!r}" + (f"; it has {near!r}" if near else "")
