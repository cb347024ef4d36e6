"""Products of the Hessian of the mean loss with a vector, without computing the Hessian.

Hv = Σ_b (n_b/n) ∇(∇L_b · v) by differentiating twice. The first derivative does not depend on v: its graph is kept for
as many batches as fit into memory. A product then takes as long as about 1.5 gradients instead of 2.5.
(Forward-over-reverse differentiation takes as long as 2.5 gradients and cannot keep anything.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.batches import lanes
from fedflat.analysis.parallel import Parallel, worker_count, zeros_for_all
from fedflat.analysis.problem import Options, Problem, Protocol, add_parts, opened
from fedflat.core.devices import on
from fedflat.core.flat import FlatModel, Span
from fedflat.errors import InputError

PRODUCT = 1.8  # approximate duration of a product, in gradients
Product = Callable[[Tensor], Tensor]
"""v ↦ Hv for a symmetric H; the eigenvalue and trace methods need nothing else of a Hessian."""


def hessian_product(model: nn.Module | FlatModel, data: Any, vector: Tensor, **options: Unpack[Options]) -> Tensor:
    """Hv of the mean loss.

    Args:
        vector: v, one entry per trainable parameter, in the order of `parameters()`. Hv is where v is.
    """
    with opened(model, data, Protocol.of(options)) as problem, Hessian(problem) as hessian:
        if vector.shape != (hessian.size,):
            raise InputError(f"the vector has shape {tuple(vector.shape)}, the model {hessian.size} parameters")
        return on(hessian(vector), vector.device)


class Hessian:
    """The Hessian of a problem, or one diagonal block of it, as a function v ↦ Hv.

    Use it in a `with` statement, which ends its worker processes.

    Args:
        spans: The tensors of the block; the graph then covers only the layers that they need. None is all of them.

    Attributes:
        like: A vector of the size and type of v, where v is best placed.
        count: Number of products so far.
        seconds: Estimated duration of one product.
        step: Called after each product.
    """

    def __init__(self, problem: Problem, spans: list[Span] | None = None) -> None:
        chosen = problem.flat.spans if spans is None else spans
        by_name = dict(zip((span.name for span in problem.flat.spans), problem.parameters, strict=True))
        self._problem, self._parameters = problem, [by_name[span.name] for span in chosen]
        self.spans = _packed(chosen)
        self.size, self.like, self.count = self.spans[-1].stop, problem.flat.theta.new_empty(self.spans[-1].stop), 0
        self._lanes = lanes(len(problem.batches))
        self._vector = zeros_for_all((self.size,), self.like)
        self._sums = zeros_for_all((len(self._lanes), self.size), self.like)
        self._graphs: dict[int, tuple[Tensor, ...]] = {}
        self._room = self._room_for_graphs()
        self._parallel = Parallel(self._add_lane, len(self._lanes), problem.workers)
        self.seconds = PRODUCT * problem.seconds / self._parallel.size
        self.step: Callable[[], None] = lambda: None

    def _room_for_graphs(self) -> int:
        """Number of batches whose graphs can be kept, in addition to the one that each worker is working on."""
        largest = max(len(y) for _, y in self._problem.batches)
        each = max(self._problem.sample_bytes(), 1) * largest
        busy = 2 * worker_count(self._problem.workers, len(self._lanes))
        return max(0, int(self._problem.protocol.memory * 2**30 / each) - busy)

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv."""
        self._vector.copy_(vector)
        self._parallel.run()
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
        self._parallel.__exit__(*error)
        self._graphs.clear()


def _refuse_dead_ends(gradient: tuple[Tensor, ...]) -> None:
    """Raise an error for functions that can be differentiated only once: they drop second-order terms silently."""
    seen, nodes = set(), [part.grad_fn for part in gradient]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "Error":
            raise InputError(
                "the model cannot be differentiated twice: one of its functions is marked once_differentiable"
            )
        seen.add(node)
        nodes += [after for after, _ in node.next_functions]


def _packed(spans: list[Span]) -> list[Span]:
    """The same tensors, stored one directly after the other."""
    packed, start = [], 0
    for span in spans:
        size = span.stop - span.start
        packed.append(Span(span.name, start, start + size, span.shape))
        start += size
    return packed
