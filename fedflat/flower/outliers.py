"""Updates out of all proportion: refused by the name of their sender before they are summed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from fedflat.core.tensors import flatten
from fedflat.core.views import Update
from fedflat.flower.messages import failed

RATIO = 100.0  # times the usual norm: so far from it that no method and no schedule explains it
FEW = 3  # norms without which none is usual


class Outliers:
    """Knows the norms that are usual: for every tensor the largest median that a round had so far.

    The updates of the first round are kept until all have arrived; from then on each is judged as it comes.
    """

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def judged(self, updates: Iterable[Update]) -> Iterator[Update]:
        """The updates of a round, those out of proportion as failed ones."""
        seen: dict[str, list[float]] = {}
        if not self._usual:
            updates = list(updates)
            for update in updates:
                _note(seen, update)
            self._learn(seen)
            seen = {}
        for update in updates:
            _note(seen, update)
            yield self._judged(update)
        self._learn(seen)

    def _judged(self, update: Update) -> Update:
        for name, norm in _norms(update).items():
            usual = self._usual.get(name, 0.0)
            if usual and norm > RATIO * usual:
                why = f"it is suspected of an attack: the norm of its {name!r} is {norm:.3g}, and {usual:.3g} is usual"
                return replace(failed(update.client, why), samples=update.samples)
        return update

    def _learn(self, seen: Mapping[str, list[float]]) -> None:
        for name, norms in seen.items():
            if len(norms) >= FEW:
                self._usual[name] = max(self._usual.get(name, 0.0), statistics.median_low(norms))


def _norms(update: Update) -> dict[str, float]:
    tensors: dict[str, Tensor] = {"delta": update.delta, **flatten({"sent": update.sent})}
    return {name: float(tensor.double().norm()) for name, tensor in tensors.items() if tensor.is_floating_point()}


def _note(seen: dict[str, list[float]], update: Update) -> None:
    if update.failure is None:
        for name, norm in _norms(update).items():
            seen.setdefault(name, []).append(norm)
