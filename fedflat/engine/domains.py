"""Evaluation of SiLoBN with the statistics of the domain that a test sample comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.core.private import Private
from fedflat.core.scores import Score
from fedflat.core.tensors import State
from fedflat.engine.backends.base import Backend
from fedflat.engine.evaluation import chunks_of
from fedflat.engine.setup import Broadcast, Setup

States = Callable[[int], Mapping[str, State]]


def by_domain(setup: Setup, backend: Backend, broadcast: Broadcast, states: States, test: str = "") -> Score:
    """The score on a test set, domain by domain.

    A domain in which clients have trained is scored with their statistics, every other one with those of the batch.

    Args:
        states: What a client has kept.
        test: The name of the test set; empty for the common one.
    """
    known, total = domain_statistics(setup, states), Score()
    for domain, positions in setup.federation.domains_of(test).items():
        buffers = broadcast.buffers.clone()
        if domain in known:
            buffers[setup.private.buffers] = known[domain]
        chunks = chunks_of(len(positions), "test", test=test)
        chunks = [replace(chunk, domain=domain, by_batch=domain not in known) for chunk in chunks]
        total = sum(backend.evaluate(replace(broadcast, buffers=buffers), chunks), total)
    return total


def domain_statistics(setup: Setup, states: States) -> dict[str, Tensor]:
    """BatchNorm's statistics per domain: the mean over its clients that have trained, weighted by their samples."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for client, domain in enumerate(setup.federation.domains[: setup.clients]):
        kept = states(client).get(Private.KEY) if domain else None
        if kept:
            size = setup.federation.size(client)
            sums[domain] = sums.get(domain, torch.zeros(())) + size * kept["buffers"].double()
            counts[domain] = counts.get(domain, 0) + size
    return {domain: (total / counts[domain]).to(setup.model.theta.dtype) for domain, total in sums.items()}
