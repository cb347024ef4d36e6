"""Products of the Hessian of the mean loss with a vector, without the Hessian.

Hv = Σ_b (n_b/n) ∇(∇L_b · v) by differentiating twice. The first derivative does not depend on v: its graph is kept for
as many batches as the memory allows, and a product then takes about one and a half gradients instead of two and a half.
(Forward-over-reverse differentiation takes as long as the latter and can keep nothing.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.data import lanes
from fedflat.analysis.protocol import Options, Problem, Protocol, add_parts, opened
from fedflat.analysis.team import Team, shared, team_size
from fedflat.errors import InputError
from fedflat.flat import FlatModel, Span

PRODUCT = 1.8  # gradients that a product takes, roughly
Product = Callable[[Tensor], Tensor]
"""v ↦ Hv for a symmetric H; all that the eigenvalue and trace methods know of a Hessian."""


def hessian_product(model: nn.Module | FlatModel, data: Any, vector: Tensor, **options: Unpack[Options]) -> Tensor:
    """Hv of the mean loss. vector: as long as the trainable parameters together, in the order of `parameters()`."""
    with opened(model, data, Protocol.of(options)) as problem, Hessian(problem) as hessian:
        if vector.shape != (hessian.size,):
            raise InputError(f"the vector has shape {tuple(vector.shape)}, the model {hessian.size} parameters")
        return hessian(vector)


class Hessian:
    """The Hessian of a problem, or its diagonal block of some spans, as a function v ↦ Hv.

    spans: the tensors of the block; the graph then reaches back only as far as it must.
    Use it in a `with`, which ends its worker processes. `count` is the number of products so far.
    """

    def __init__(self, problem: Problem, spans: list[Span] | None = None) -> None:
        chosen = problem.flat.spans if spans is None else spans
        by_name = dict(zip((span.name for span in problem.flat.spans), problem.parameters, strict=True))
        self._problem, self._parameters = problem, [by_name[span.name] for span in chosen]
        self.spans = _packed(chosen)
        self.size, self.dtype, self.count = self.spans[-1].stop, problem.flat.theta.dtype, 0
        self._lanes = lanes(len(problem.batches))
        self._vector = shared((self.size,), problem.flat.theta.dtype)
        self._sums = shared((len(self._lanes), self.size), problem.flat.theta.dtype)
        self._graphs: dict[int, tuple[Tensor, ...]] = {}
        self._room = self._room_for_graphs()
        self._team = Team(self._add_lane, len(self._lanes), problem.protocol.workers)
        self.seconds = PRODUCT * problem.seconds / self._team.size  # what one product is likely to take
        self.step: Callable[[], None] = lambda: None  # called after each product

    def _room_for_graphs(self) -> int:
        """How many batches' graphs may be kept beside the one that each worker is busy with."""
        largest = max(len(y) for _, y in self._problem.batches)
        each = max(self._problem.sample_bytes(), 1) * largest
        busy = 2 * team_size(self._problem.protocol.workers, len(self._lanes))
        return max(0, int(self._problem.protocol.memory * 2**30 / each) - busy)

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv."""
        self._vector.copy_(vector)
        self._team.run()
        self.count += 1
        self.step()
        total = self._sums[0].clone()
        for part in self._sums[1:]:
            total += part
        if not bool(total.isfinite().all()):
            raise InputError("a Hessian product is not finite: the loss has no finite second derivative here")
        return total

    def _add_lane(self, lane: int) -> None:
        total = self._sums[lane].zero_()
        for index in self._lanes[lane]:
            add_parts(total, self.spans, self._product(index), self._problem.weight(index))

    def _product(self, index: int) -> list[Tensor | None]:
        keep = index < self._room
        gradient = self._graphs.get(index) or self._differentiate(index)
        if keep:
            self._graphs[index] = gradient
        curved = [(g, span.of(self._vector)) for g, span in zip(gradient, self.spans, strict=True) if g.requires_grad]
        if not curved:  # the loss is linear in these parameters
            return []
        outputs, vectors = zip(*curved, strict=True)
        try:
            return list(torch.autograd.grad(outputs, self._parameters, vectors, retain_graph=keep, allow_unused=True))
        except RuntimeError as error:
            raise InputError(f"the model cannot be differentiated twice: {error}") from None

    def _differentiate(self, index: int) -> tuple[Tensor, ...]:
        loss = self._problem.batch_loss(index)
        if not loss.requires_grad:
            return tuple(torch.zeros_like(p) for p in self._parameters)
        gradient = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
        if index == 0:
            _refuse_dead_ends(gradient)
        return gradient

    def __enter__(self) -> Hessian:
        return self

    def __exit__(self, *error: object) -> None:
        self._team.__exit__(*error)
        self._graphs.clear()


def _refuse_dead_ends(gradient: tuple[Tensor, ...]) -> None:
    """Functions that are differentiable once leave out terms of a second derivative without a word; find them."""
    seen, nodes = set(), [part.grad_fn for part in gradient]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "Error":
            raise InputError("the model cannot be differentiated twice: a function of it is marked once_differentiable")
        seen.add(node)
        nodes += [after for after, _ in node.next_functions]


def _packed(spans: list[Span]) -> list[Span]:
    """The same tensors, one directly after the other."""
    packed, start = [], 0
    for span in spans:
        size = span.stop - span.start
        packed.append(Span(span.name, start, start + size, span.shape))
        start += size
    return packed
