"""What a method costs a client, measured on real local steps of a few samples instead of written down per method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedflat import streams
from fedflat.assembly import make_task
from fedflat.backends.base import Broadcast, Order
from fedflat.backends.serial import Serial
from fedflat.cost.counting import counting, weight_parameters
from fedflat.cost.saved import Saved
from fedflat.data import Federation
from fedflat.experiment import Experiment
from fedflat.method import Local, Method, Update
from fedflat.parts.gradaug import GradAug
from fedflat.server import RoundLoop, fresh_server
from fedflat.store import ClientStore
from fedflat.task import Task

BATCH = 2  # samples of a measured step
WIDTHS = 16  # points at which a uniform law of widths is evaluated


@dataclass(frozen=True)
class Cost:
    """What a client needs.

    macs: multiply-accumulate operations of convolutions and linear layers, in all forward passes of a local step, by
        sample; the expected number where passes are random.
    models: how many models it holds while it trains: the one in training, the one received if every step reads it, and
        all else of a model's size that it receives or keeps from round to round.
    parameters, weights: numbers in these models: all of them; those of convolutions and linear layers alone.
    memory: bytes of these models, the gradient, the momentum, and what a step's forward passes keep for the gradient.
        An estimate by the sizes of the tensors; a process needs more.
    """

    macs: float
    models: int
    parameters: int
    weights: int
    memory: float


def cost_of(experiment: Experiment, shape: tuple[int, ...], classes: int) -> Cost:
    """The cost of an experiment's method for its model and batch size, on inputs of this shape."""
    small = {"batch_size": BATCH, "local_steps": 1, "rounds": 1000, "evaluate_every": 0, "backend": "serial"}
    task = make_task(experiment.replace(**small), federation=synthetic(shape, classes, clients=1, samples=BATCH))
    model, probe = task.model, Probe(task)
    loop = RoundLoop(task, fresh_server(task), probe, ClientStore(None), lambda t: [0])
    probe.round(loop, steps=1)  # some methods do more from a client's second round on
    saved = probe.round(loop, steps=1).saved
    task.method = Method(Muted(**vars(p)) if isinstance(p, GradAug) else p for p in task.method.parts)
    one, two = probe.round(loop, steps=1), probe.round(loop, steps=2)
    muted = sum((two.muted - one.muted) * expected_macs(p, task) for p in task.method.parts if isinstance(p, Muted))
    models = 1 + (two.reads > one.reads) + two.others
    numbers = model.size * (models + 1 + (experiment.momentum > 0)) + model.buffers.numel()
    return Cost(
        macs=(two.macs - one.macs) / BATCH + muted,
        models=models,
        parameters=models * model.size,
        weights=models * weight_parameters(model.module),
        memory=numbers * model.theta.element_size() + saved / BATCH * (experiment.batch_size or BATCH),
    )


def synthetic(shape: tuple[int, ...], classes: int, clients: int, samples: int) -> Federation:
    """Noise with random labels, as much for every client."""
    generator = streams.torch_stream(0, "synthetic")
    x = torch.randint(256, (clients, samples, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(classes, (clients, samples), generator=generator)
    return Federation(list(zip(x, y, strict=True)), classes=classes, name="synthetic")


@dataclass
class Seen:
    """What was seen in a client's round.

    reads: how often the received weights were used. others: tensors of a model's size, received besides or kept.
    saved: the most bytes kept for a gradient. muted: how often a `Muted` part was asked for its passes.
    """

    macs: float = 0.0
    reads: int = 0
    others: int = 0
    saved: int = 0
    muted: int = 0


class Probe(Serial):
    """A back end that watches what its client does."""

    def round(self, loop: RoundLoop, steps: int) -> Seen:
        """Run a round of so many local steps; two that differ in them tell what a step takes and what a round."""
        self.task.experiment = self.task.experiment.replace(local_steps=steps)
        self.seen = Seen()
        loop.run_round()
        return self.seen

    def visit(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Update]:
        """See `Backend.visit`."""
        model, seen = self.task.model, self.seen
        theta, saved = watched(broadcast.theta, seen), Saved(but=model.theta)
        with counting(model.module) as count, saved:
            for update in super().visit(replace(broadcast, theta=theta), orders):
                groups = [*broadcast.received.values(), *update.states.values()]
                seen.others = sum(tensor.numel() == model.size for group in groups for tensor in group.values())
                seen.muted = sum(part.calls.pop() for part in self.task.method.parts if isinstance(part, Muted))
                yield update
        seen.macs, seen.saved = count.macs, saved.peak


def watched(tensor: Tensor, seen: Seen) -> Tensor:
    """The same tensor; every function that it is given to adds one to `seen.reads`."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.reads += func.__name__ != "__get__"  # not for a look at its shape
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return tensor.as_subclass(Watched)


@dataclass(frozen=True)
class Muted(GradAug):
    """GradAug without its passes, whose cost is random; it counts how often it is asked for them."""

    name: ClassVar[str] = GradAug.name
    calls: list[int] = field(default_factory=list)

    def begin(self, local: Local) -> None:
        """Count from 0."""
        self.calls.append(0)

    def loss(self, local: Local, output: Tensor) -> None:
        """Count, and do nothing."""
        self.calls[-1] += 1


@torch.no_grad()
def expected_macs(part: GradAug, task: Task) -> float:
    """MACs of one set of passes of GradAug for a sample: the mean over its resolutions and its law of the widths."""
    x = torch.zeros((1, *task.federation.input_shape), dtype=task.model.theta.dtype)
    task.model.module.eval()

    def mean_macs(widths: Sequence[float]) -> float:
        with counting(task.model.module) as count:
            for width, size in product(widths, part.resolutions):
                part.scores(task.model, x, width, size)
        return count.macs / (len(widths) * len(part.resolutions))

    spread = [part.width + (1 - part.width) * (i + 0.5) / WIDTHS for i in range(WIDTHS)]
    fixed = 0 if part.all_random else 1
    return fixed * mean_macs([part.width]) + (part.n - fixed) * mean_macs(spread)
