"""One update out of many: regroup, then combine, where a method asks for it also over what parts send besides."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.core.batchnorm import batchnorms
from fedflat.core.method import Method
from fedflat.core.sums import Terms
from fedflat.core.tensors import flatten
from fedflat.core.views import Server, Update
from fedflat.engine.faults import vector_like
from fedflat.engine.setup import Setup

log = logging.getLogger(__name__)


def combine(method: Method, server: Server, updates: Iterable[Update]) -> tuple[Tensor, Terms]:
    """The combined update, and the sums of those messages that a robust combination covers."""
    owner = method.owner("combine")
    names, vectors = list[str](), list[dict[str, Tensor]]()
    if owner.robust:
        updates = list(updates)
        vectors = [_messages(method, update) for update in updates]
        names = sorted(set.intersection(*map(set, vectors))) if vectors else []
        if names and owner.robust == "update" and server.round == 1:
            log.warning("%s looks at updates only: what %s sends is summed as it comes", owner.name, _senders(names))
    if not names or owner.robust == "update":
        made = owner.combine(server, _regrouped(method, server, updates))
        return vector_like(made, server.theta, owner.name, "combine"), Terms()
    joined = [
        replace(update, delta=torch.cat([update.delta, *(sent[name].reshape(-1) for name in names)]))
        for update, sent in zip(updates, vectors, strict=True)
    ]
    whole = vector_like(
        owner.combine(server, _regrouped(method, server, joined)), joined[0].delta, owner.name, "combine"
    )
    shapes = [server.theta.shape, *(vectors[0][name].shape for name in names)]
    delta, *sums = torch.split(whole, [shape.numel() for shape in shapes])
    found = zip(names, sums, shapes[1:], strict=True)
    return delta.clone(), Terms({name: part.reshape(shape) * len(joined) for name, part, shape in found})


def warn_of_statistics(setup: Setup) -> None:
    """Say which of what clients send no robust combination covers, if the method has one."""
    owner, private = setup.method.owner("combine"), setup.private.names
    shared = [name for name, _ in batchnorms(setup.model.module) if f"{name}.running_mean".lstrip(".") not in private]
    if owner.robust and shared:
        log.warning(
            "%s does not cover BatchNorm's statistics (%s%s), which are averaged: any client can spoil them. "
            "batchnorm='local' or 'silobn' keeps them with the clients",
            owner.name,
            shared[0],
            ", …" if len(shared) > 1 else "",
        )


def _regrouped(method: Method, server: Server, updates: Iterable[Update]) -> Iterable[Update]:
    for part in method.filling("regroup"):
        updates = part.regroup(server, updates)
    return updates


def _messages(method: Method, update: Update) -> dict[str, Tensor]:
    """The floating-point tensors that parts of the method send with an update."""
    real = {part.name: update.sent[part.name] for part in method.parts if _counts(part, update)}
    return {name: tensor for name, tensor in flatten(real).items() if tensor.dtype == update.delta.dtype}


def _counts(part: object, update: Update) -> bool:
    return getattr(part, "name", "") in update.sent and not getattr(part, "simulation_only", False)


def _senders(names: Sequence[str]) -> str:
    return " and ".join(sorted({name.split("/")[0] for name in names}))
