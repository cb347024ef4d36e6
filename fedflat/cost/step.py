"""What a method costs per client, measured on real local steps of a few samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.method import Method
from fedflat.core.optimizer_choice import optimizer_of
from fedflat.core.updates import Updates
from fedflat.cost.counting import counting, weight_parameters
from fedflat.cost.saved import Saved
from fedflat.data import Federation
from fedflat.engine.assembly import make_setup
from fedflat.engine.backends.serial import Serial
from fedflat.engine.round_loop import RoundLoop
from fedflat.engine.setup import Broadcast, Jobs, fresh_server
from fedflat.experiment import Experiment
from fedflat.runs.store import ClientStore

BATCH = 2  # samples in a measured step


@dataclass(frozen=True)
class Cost:
    """What a method costs per client.

    Attributes:
        macs: Multiply-accumulate operations of convolutions and linear layers in all forward passes of a local step,
            per sample; the expected number if the passes are random. The first step of a round, in which some methods
            do less, is not the one that counts.
        models: The number of models that the client holds during training: the one it trains, the one it received if
            every step reads it, and every other tensor of a model's size that it receives or keeps between rounds.
        parameters: The number of parameters in these models.
        weights: The same for convolutions and linear layers only.
        memory: Bytes of these models, of parameters that are not trained, the gradient, the state of the optimiser, and
            what the forward passes of a step keep for the gradient. This is an estimate from the sizes of the tensors;
            the process needs more.
    """

    macs: float
    models: int
    parameters: int
    weights: int
    memory: float


def cost_of(experiment: Experiment, shape: tuple[int, ...], classes: int) -> Cost:
    """The cost of an experiment's method with its model and batch size, for inputs of this shape."""
    small: dict[str, Any] = {"batch_size": BATCH, "local_steps": 1, "rounds": 1000, "evaluate_every": 0}
    # Counts do not depend on these.
    small |= {"microbatch": None, "backend": "serial", "device": "cpu", "compile": "none"}
    data = synthetic(shape, classes, fewest_clients(experiment), samples=BATCH)
    setup = make_setup(experiment.replace(**small), federation=data)
    model, probe = setup.model, Probe(setup)
    loop = RoundLoop(setup, fresh_server(setup), probe, ClientStore(None), lambda t: [0])
    probe.round(loop, steps=1)  # first: some methods do more after a client's first round
    one = probe.round(loop, steps=1)
    two = probe.round(loop, steps=2)
    models = 1 + (two.reads > one.reads) + two.others
    optimizer = sum(tensor.numel() for tensor in optimizer_of(experiment).start(model.theta).values())
    together = min(experiment.microbatch or math.inf, experiment.batch_size or BATCH)
    frozen = sum(tensor.numel() for _, tensor in model.frozen)
    numbers = model.size * (models + 1) + optimizer + model.buffers.numel() + frozen
    return Cost(
        macs=_expected_macs(probe, loop, one, two) / BATCH,
        models=models,
        parameters=models * model.size,
        weights=models * weight_parameters(model.module),
        memory=numbers * model.theta.element_size() + max(one.saved, two.saved) / BATCH * together,
    )


def fewest_clients(experiment: Experiment) -> int:
    """With how many clients the experiment's method works at least."""
    return max(part.fewest_clients for part in Method.parse(experiment.method).parts)


def _expected_macs(probe: Probe, loop: RoundLoop, one: Seen, two: Seen) -> float:
    """MACs of a local step after the first, given rounds of one step and of two.

    If passes are random, the weighted sum over the variants of the method, whose passes are not. What the second step
    does more than the first is then taken from one variant: it is the same for all of them.
    """
    variants = list(itertools.product(*(part.cost_variants() for part in probe.setup.parts)))
    if len(variants) == 1:
        return two.macs - one.macs
    total, outside, more = 0.0, probe.round(loop, steps=0).macs, None
    for variant in variants:
        probe.setup.method = Method(part for _, part in variant)
        first = probe.round(loop, steps=1).macs - outside
        if more is None:
            more = probe.round(loop, steps=2).macs - outside - 2 * first
        total += math.prod(weight for weight, _ in variant) * (first + more)
    return total


def synthetic(shape: tuple[int, ...], classes: int, clients: int, samples: int) -> Federation:
    """A federation of noise images with random labels; `samples` is the number of samples per client."""
    stream = streams.stream(0, "synthetic")
    x = stream.integers(256, (clients, samples, *shape), torch.uint8)
    y = stream.integers(classes, (clients, samples))
    return Federation(list(zip(x, y, strict=True)), classes=classes, name="synthetic")


@dataclass
class Seen:
    """What a `Probe` measured in one round of a client.

    Attributes:
        macs: See `Cost.macs`, for the whole round and batch.
        reads: How often the received weights were used.
        others: The number of other models' sizes in the tensors that the client received or keeps.
        saved: The largest number of bytes kept for a gradient.
    """

    macs: float = 0.0
    reads: int = 0
    others: int = 0
    saved: int = 0


class Probe(Serial):
    """A serial back end that measures what its client does."""

    def round(self, loop: RoundLoop, steps: int) -> Seen:
        """Run a round with this number of local steps. The difference of two such rounds is the cost of a step."""
        self.setup.experiment = self.setup.experiment.replace(local_steps=steps)
        self.seen = Seen()
        loop.run_round()
        return self.seen

    def run(self, broadcast: Broadcast, jobs: Jobs) -> Iterator[Updates]:
        """See `Backend.run`."""
        model, seen = self.setup.model, self.seen
        theta, saved = watched(broadcast.theta, seen), Saved(but=model.theta)
        with counting(model.module) as count, saved:
            for updates in super().run(replace(broadcast, theta=theta), jobs):
                groups = [*broadcast.received.values(), *updates[0].states.values()]
                seen.others = sum(models_in(tensor, model.size) for group in groups for tensor in group.values())
                yield updates
        seen.macs, seen.saved = count.macs, saved.peak


def models_in(tensor: Tensor, size: int) -> int:
    """How many models of this size a tensor holds; 0 unless they fill it.

    >>> [models_in(torch.zeros(*shape), 5) for shape in ((5,), (3, 5), (7,), (1,))]
    [1, 3, 0, 0]
    """
    return tensor.numel() // size if tensor.numel() % size == 0 else 0


def watched(tensor: Tensor, seen: Seen) -> Tensor:
    """The same tensor; every function that is called with it adds one to `seen.reads`."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.reads += func.__name__ != "__get__"  # reading an attribute such as the shape does not count
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return tensor.as_subclass(Watched)
