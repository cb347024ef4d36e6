"""The conditions under which every analysis looks at a model, the same for all of them, so that numbers compare.

The model is copied, and only the copy is touched: evaluation mode, dropout off, BatchNorm with its running statistics,
fixed samples in a fixed order, one thread a process. So the model stays bit for bit as it was, whatever happens, and
the global generators are put back. Parameters without `requires_grad` are constants. Weights of half precision are
looked at in single precision, which holds them exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fedflat import streams
from fedflat.analysis.data import WIDEST, cut, read, subset
from fedflat.analysis.options import Options, Protocol
from fedflat.analysis.problem import Conditions, Problem, add_parts, suited
from fedflat.errors import InputError
from fedflat.flat import FlatModel

__all__ = ["Conditions", "Options", "Problem", "Protocol", "add_parts", "opened", "private_copy", "suited", "unchecked"]


@contextmanager
def opened(model: nn.Module | FlatModel, data: Any, protocol: Protocol) -> Iterator[Problem]:
    """The problem of looking at a model, checked; see the module."""
    with _quiet(protocol.seed):
        problem = unchecked(model, data, protocol)
        problem.check()
        yield problem


def unchecked(model: nn.Module | FlatModel, data: Any, protocol: Protocol) -> Problem:
    """The problem without the two evaluations of its check."""
    flat = private_copy(model, protocol.bn)
    batches = read(data)
    if protocol.max_samples is not None:
        batches = subset(batches, protocol.max_samples, protocol.seed)
    problem = Problem(flat, batches, protocol)
    if protocol.batch_size is not None:
        problem.batches = cut(batches, protocol.batch_size)
    elif protocol.bn != "batch":
        problem.batches = cut(batches, fitting(problem), shared=True)
    elif len(batches) == 1 and len(batches[0][1]) > WIDEST:
        raise InputError("bn='batch' depends on what a batch is: give batch_size, or the data as batches")
    return problem


def fitting(problem: Problem) -> int:
    """The largest batch of which eight fit into the memory allowed."""
    return max(1, min(WIDEST, int(problem.protocol.memory * 2**30 / 8 / max(problem.sample_bytes(), 1))))


def private_copy(model: nn.Module | FlatModel, bn: str = "running") -> FlatModel:
    """A copy in evaluation mode that shares nothing with the model."""
    module = model.module if isinstance(model, FlatModel) else model
    trainable = [p for p in module.parameters() if p.requires_grad] if isinstance(module, nn.Module) else []
    if not trainable:
        raise InputError(
            f"nothing in {type(module).__name__} requires a gradient: "
            "call requires_grad_() on the parameters to be analysed"
        )
    try:
        flat = FlatModel(copy.deepcopy(module), torch.promote_types(trainable[0].dtype, torch.float32))
    except RuntimeError as error:
        raise InputError(f"{type(module).__name__} cannot be copied ({error}): detach the tensors it keeps") from None
    flat.module.eval()
    if bn == "batch":
        _forget_statistics(flat.module)
    return flat


def _forget_statistics(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.running_mean = part.running_var = None


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """One thread, generators of our own, and kernels that can be differentiated twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with streams.isolated(seed, "analysis"), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
