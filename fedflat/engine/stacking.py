"""How many clients a worker trains in lockstep: what `Experiment.stack` says, if method, network and data allow it."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.core import streams
from fedflat.core.batchnorm import batchnorms
from fedflat.core.devices import accelerated
from fedflat.core.flat import FlatModel
from fedflat.core.forked import can_fork, in_child
from fedflat.core.inputs import map_inputs
from fedflat.core.part import can_stack
from fedflat.core.samples import IGNORED
from fedflat.core.stacked import StackedModel
from fedflat.engine.drawing import Drawing
from fedflat.engine.jobs import run_jobs
from fedflat.engine.placement import fork_hindrance, processes
from fedflat.engine.setup import Broadcast, Jobs, Setup, fresh_server
from fedflat.tasks.losses import row_losses

log = logging.getLogger(__name__)
CHOICES = (8, 16, 32, 128, 512)
"""The sizes that `auto` tries, beside a worker's share of a round if that is between the smallest and the largest."""
LARGE = 1 << 20  # weights: a network of this size is never faster in a stack
GAIN = 1.1  # how much faster a stack must be in the trial
REPEATS, SECONDS = 6, 0.5  # of a trial
LOOK = 1000  # clients whose sizes are compared
TAKES_MEANS = ("around_forward", "loss")  # slots of parts that may take means over a minibatch


def prepare(setup: Setup, choose: Callable[..., Iterable[int]], picked: int | None = None) -> None:
    """Set `setup.stack`, `setup.pads` and `setup.folds`; a wish that cannot be met is told once.

    Args:
        setup: The setup of the run.
        choose: The participants, see `RoundLoop`.
        picked: What `auto` picked when the run began; None: it is measured now.
    """
    wanted = setup.experiment.stack
    setup.stack, setup.pads, setup.folds = 1, False, False
    if wanted == 1 or (wanted == "auto" and picked == 1):
        return
    if accelerated() and can_fork() and not fork_hindrance(setup.devices):
        # The trials compute gradients, after which this process could fork no workers.
        setup.stack, setup.pads, setup.folds = in_child(lambda: _prepared(setup, choose, picked))
    else:
        _prepared(setup, choose, picked)


def _prepared(setup: Setup, choose: Callable[..., Iterable[int]], picked: int | None) -> tuple[int, bool, bool]:
    """`prepare` in this process; returns what it sets."""
    wanted = setup.experiment.stack
    with streams.preserved(), _statistics_kept(setup):
        why = _examined(setup)
        if why is not None:
            log.log(
                logging.INFO if wanted == "auto" else logging.WARNING, "clients train one by one, not stacked: %s", why
            )
        elif wanted == "auto":
            setup.stack = picked or _fastest(setup, choose)
            log.info("stack=auto: a worker trains %d clients at once", setup.stack)
        else:
            setup.stack = int(wanted)
            _tell_of_sizes(setup)
    return setup.stack, setup.pads, setup.folds


def dealt(sizes: np.ndarray, stack: int) -> np.ndarray:
    """The order in which clients, largest first, fill stacks: two stacks at a time, as equally long as can be.

    Consecutive clients would make one stack long and the next one short, and a second worker wait. But both then take
    as many steps as the largest client of both, so clients that differ by more than half stay consecutive.

    >>> dealt(np.array([9, 9, 8, 8, 7, 7, 7, 6, 6]), 2).tolist(), dealt(np.array([9, 9, 4, 4]), 2).tolist()
    ([0, 2, 1, 3, 4, 6, 5, 7, 8], [0, 1, 2, 3])
    """
    count, pair = len(sizes), 2 * stack
    order = np.arange(count)
    for start in range(0, count - stack, pair) if stack > 1 else ():
        both = order[start : start + pair]
        if 2 * sizes[start + stack] >= sizes[start]:
            first = np.arange(stack) * len(both) // stack
            both[:] = start + np.concatenate([first, np.delete(np.arange(len(both)), first)])
    return order


@contextmanager
def _statistics_kept(setup: Setup) -> Iterator[None]:
    """Undo what the block does to the model's buffers: trials train."""
    vectors = setup.model.buffers, setup.model.counters
    before = [vector.clone() for vector in vectors]
    try:
        yield
    finally:
        for vector, old in zip(vectors, before, strict=True):
            vector.copy_(old)


def _tell_of_sizes(setup: Setup) -> None:
    """Say once that stacks are small where only clients of the same size can share one."""
    if setup.pads:
        return
    clients = range(min(setup.clients, LOOK))
    sizes = len(set(setup.federation.sizes_of(clients).tolist()))
    if sizes > 1:
        parts = [p.name for slot in TAKES_MEANS for p in setup.method.filling(slot)]
        who = f"the part {parts[0]!r}" if parts else "the network or the loss"
        log.warning(
            "stack=%d: since %s treats minibatches as a whole, only clients with equally many samples train together; "
            "%d clients have %d sizes",
            *(setup.stack, who, len(clients), sizes),
        )


def _examined(setup: Setup) -> str | None:
    """Why clients cannot be stacked, or None; finds out whether minibatches may be filled up, and the network folds."""
    for part in setup.method.parts:
        if not can_stack(part):
            return f"the part {part.name!r} works on one client at a time"
    for name, layer in batchnorms(setup.model.module):
        return f"{name} ({type(layer).__name__}) keeps statistics of its batches"
    if setup.experiment.precision != "float32":
        return f"precision={setup.experiment.precision!r}"
    if setup.experiment.microbatch is not None:
        return f"microbatch={setup.experiment.microbatch}"
    if setup.experiment.compile != "none":
        return f"compile={setup.experiment.compile!r}"
    samples, before = setup.federation.samples(0), streams.global_states()
    positions = torch.arange(2) % len(samples)
    x, y = samples.batch(positions)
    x = setup.federation.preprocess(x, None, setup.model.theta.dtype)
    if streams.global_states() != before:
        return "reading the data draws random numbers, which a stack cannot tell apart by client"
    return _tried(setup, x, y)


def _tried(setup: Setup, x: object, y: Tensor) -> str | None:
    """Train two clients on the same minibatch, alone and stacked; see `_examined`."""
    model, criterion = setup.model, setup.criterion
    model.module.train()
    stacked = _pair(setup)
    entered: list[str] = []
    torch.default_generator.manual_seed(0)
    alone = criterion(model(x), y)
    states = streams.global_states()
    for name in _moved(model, stacked):
        return f"{name} changes with every batch"
    try:
        with _noting(setup, entered):
            twice = _twice((x, y))
            losses = stacked.each(lambda x, y: criterion(stacked(x), y), *twice)
            losses.backward(torch.ones_like(losses))
    except Exception as error:
        drawn = "randomness" in str(error)  # `torch.vmap` names its own flags
        reason = "it draws random numbers" if drawn else str(error).strip().split("\n")[0][:160]
        return f"{' → '.join(entered) or 'the loss'} cannot be vectorised over clients: {reason}"
    finally:
        model.grad.zero_()
        model.take_features()
    if streams.global_states() != states or not torch.allclose(
        losses, alone.expand(2), rtol=1e-3, atol=1e-5, equal_nan=True
    ):
        return f"{type(model.module).__name__} computes something else for stacked clients"
    quiet = not any(map(setup.method.filling, TAKES_MEANS))
    setup.pads = quiet and not stacked.draws and _fills_up(setup, x, y)
    setup.folds = all(_folds(setup, x, y, training) for training in (False, True))
    return None


def _moved(model: FlatModel, before: StackedModel) -> Iterator[str]:
    """The names of the buffers that are others than before."""
    for spans, now, old in (
        (model.buffer_spans, model.buffers, before.buffers[0]),
        (model.counter_spans, model.counters, before.counters[0]),
    ):
        for span in spans:
            if not torch.allclose(span.of(now), span.of(old), rtol=0, atol=0, equal_nan=True):
                yield span.name


def _pair(setup: Setup, folds: bool = False) -> StackedModel:
    """Two clients with the weights of the setup's model."""
    return StackedModel(setup.model, lambda: [torch.Generator().manual_seed(0) for _ in range(2)], 2, folds)


def _twice(x: object, second: Callable[[Tensor], Tensor] = lambda leaf: leaf) -> Any:
    return map_inputs(lambda leaf: torch.stack([leaf, second(leaf)]) if isinstance(leaf, Tensor) else leaf, x)


def _changed(leaf: Tensor) -> Tensor:
    """Other inputs that the network takes, too."""
    return leaf * 0.5 + 0.25 if leaf.is_floating_point() else leaf.amax() - leaf if leaf.numel() else leaf


def _folds(setup: Setup, x: object, y: Tensor, training: bool) -> bool:
    """Whether the network folds: two clients with weights and inputs of their own have what `torch.vmap` gives them."""
    pairs, states, found = [_pair(setup), _pair(setup, folds=True)], streams.global_states(), list[Tensor]()
    setup.model.module.train(training)
    try:
        for pair in pairs:
            pair.theta[1].mul_(0.75)
            losses = row_losses(setup.criterion)(pair(_twice(x, _changed)), _twice(y))
            pair.backpropagate(losses)
            found += [losses.detach(), pair.grad]
    except Exception:
        log.debug("the network does not fold", exc_info=True)
        return False
    finally:
        setup.model.module.train()
        setup.model.take_features()
    close = 1e-9 if found[0].dtype == torch.float64 else 1e-4
    return streams.global_states() == states and all(
        torch.allclose(mine, theirs, rtol=close, atol=close * float(theirs.abs().max()), equal_nan=True)
        for theirs, mine in (found[::2], found[1::2])
    )


@contextmanager
def _noting(setup: Setup, entered: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forward pass is under way in `entered`."""

    def enter(module: nn.Module, what: str) -> None:
        if module is setup.model.module:
            entered.clear()  # a second attempt
        entered.append(what)

    with ExitStack() as hooks:
        for name, module in setup.model.module.named_modules():
            what = f"{name} ({type(module).__name__})" if name else type(module).__name__
            hooks.enter_context(module.register_forward_pre_hook(lambda module, _, what=what: enter(module, what)))
            hooks.enter_context(module.register_forward_hook(lambda *_: entered and entered.pop() and None))
        yield


@torch.no_grad()
def _fills_up(setup: Setup, x: object, y: Tensor) -> bool:
    """Whether the network treats samples one by one, and the loss leaves out samples whose label is `IGNORED`."""
    if y.is_floating_point():
        return False
    try:
        output = setup.model(x)
        first = setup.model(map_inputs(lambda leaf: leaf[:1] if isinstance(leaf, Tensor) else leaf, x))
        whole = setup.criterion(output, y)
        filled = setup.criterion(torch.cat([output, output[:1]]), torch.cat([y, torch.full_like(y[:1], IGNORED)]))
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    apart = torch.allclose(first, output[:1], rtol=1e-3, atol=1e-5)
    return apart and bool(torch.isfinite(filled)) and torch.allclose(whole, filled, rtol=1e-5, atol=1e-7)


def _fastest(setup: Setup, choose: Callable[..., Iterable[int]]) -> int:
    """How many clients at once make a round fastest, by a short trial; 1 unless a stack is clearly faster.

    The trial tells what a client costs. How long a round takes depends on how evenly the workers can share the stacks.
    """
    if setup.model.size > LARGE:
        return 1
    steps, workers = _steps(setup, choose), 1 if setup.experiment.backend == "serial" else processes(setup)
    share = min(-(-len(steps) // workers), CHOICES[-1])  # with larger stacks, other workers would have nothing to do
    clients = sorted(range(max(1, min(setup.clients, share))), key=setup.federation.size, reverse=True)
    trial = replace(setup, experiment=setup.experiment.replace(local_steps=2, stack=1))
    server = fresh_server(setup)
    received = {part.name: part.broadcast(server) for part in setup.method.filling("broadcast")}
    broadcast = Broadcast(1, server.lr, server.theta, server.buffers, server.counters, received)
    best, fewest = 1, _seconds(trial, broadcast, clients[:4]) * _longest(steps, 1, workers) / GAIN
    for stack in sorted({size for size in (*CHOICES, share) if CHOICES[0] <= size <= share}):
        trial.stack = stack
        spent = _seconds(trial, broadcast, clients[:stack]) * _longest(steps, stack, workers)
        best, fewest = (stack, spent) if spent < fewest else (best, fewest)
    setup.load(broadcast)
    return best


def _steps(setup: Setup, choose: Callable[..., Iterable[int]]) -> np.ndarray:
    """How many steps the participants of the first round take, longest first; in any unit."""
    e, sizes = setup.experiment, setup.federation.sizes_of(Drawing(choose, fresh_server(setup), keep=False)())
    each = np.ones(len(sizes), np.int64) if e.local_steps is not None else -(-sizes // (e.batch_size or sizes.clip(1)))
    return np.sort(each)[::-1]


def _longest(steps: np.ndarray, stack: int, workers: int) -> float:
    """The share of all steps that the busiest worker takes, if whoever is free gets the next stack.

    >>> [round(_longest(np.array([2, 2, 1, 1]), stack, workers=2), 2) for stack in (1, 2, 3)]
    [0.5, 0.5, 0.83]
    """
    loads = [0] * workers
    for work in np.add.reduceat(steps[dealt(steps, stack)], np.arange(0, len(steps), stack)).tolist():
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads) / max(1, int(steps.sum()))


def _seconds(setup: Setup, broadcast: Broadcast, clients: list[int]) -> float:
    """Seconds per client of the fastest of some repetitions, after one that is not counted."""
    spent, start = math.inf, time.perf_counter()
    for repeat in range(REPEATS):
        jobs, now = Jobs("train", clients, [1.0] * len(clients)), time.perf_counter()
        run_jobs(setup, broadcast, jobs)
        spent = min(spent, time.perf_counter() - now if repeat else math.inf)
        if repeat and time.perf_counter() - start > SECONDS:
            break
    return spent / len(clients)
