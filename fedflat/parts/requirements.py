"""Checks of the data for parts that change the minibatch; each error names the part and a remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.optimizer_choice import optimizer_of
from fedflat.core.samples import IGNORED, Samples
from fedflat.core.views import SetupView, Update
from fedflat.errors import InputError

LENGTH = "the length of an update, which the one measures and the other scales"
"""What parts claim that send a number made of the update's length, or change that length."""


def two_samples(setup: SetupView) -> tuple[Any, Tensor]:
    """A client's first sample, twice, as the model gets it, with its targets: a batch for checks."""
    x, y = setup.federation.samples(0).batch(torch.zeros(2, dtype=torch.int64))
    return setup.federation.preprocess(x, None, setup.model.theta.dtype), y


def require_numbers(who: str, setup: SetupView) -> Tensor:
    """Raise an error unless the inputs are tensors of real numbers; return two samples."""
    x, _ = two_samples(setup)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{who} works on tensors of real numbers, but the inputs are {kind}: leave it out")
    return x


def require_images(who: str, setup: SetupView) -> tuple[int, int, int]:
    """Raise an error unless the inputs are images; return channels, height and width."""
    x = require_numbers(who, setup)
    if x.dim() != 4:
        raise InputError(f"{who} works on images (channels, height, width), not on {tuple(x.shape[1:])}: leave it out")
    return x.shape[1], x.shape[2], x.shape[3]


def require_classes(who: str, setup: SetupView) -> int:
    """Raise an error unless targets are classes and the model returns a score for each; return their number."""
    x, y = two_samples(setup)
    setup.model.module.eval()
    with torch.no_grad():
        output = setup.model(x)
    if not isinstance(output, Tensor) or output.dim() < 2 or y.is_floating_point() or y.shape == output.shape:
        raise InputError(f"{who} works on classes: it needs class labels and a model with one score per class")
    return int(output.shape[1])


def of_one_class(setup: SetupView, look: int = 10) -> tuple[int, int]:
    """How many of a few clients, spread over all of them, have samples of one class only; and how many are a few."""
    clients = sorted(set(torch.linspace(0, setup.clients - 1, min(look, setup.clients)).long().tolist()))
    return sum(_of_one_class(setup.federation.samples(client)) for client in clients), len(clients)


def _of_one_class(samples: Samples, look: int = 20) -> bool:
    """Whether all labels are the same; where they are in no tensor, those of a few samples."""
    labels = getattr(samples, "labels", None)
    if not isinstance(labels, Tensor):
        labels = samples.batch(torch.linspace(0, len(samples) - 1, min(look, len(samples))).long())[1]
    counted = labels[labels != IGNORED]
    return len(counted) == 0 or bool(counted.min() == counted.max())


def require_cross_entropy(who: str, setup: SetupView) -> None:
    """Raise an error unless the loss is plain cross-entropy, which the part computes for other logits."""
    if setup.criterion is not F.cross_entropy:
        raise InputError(f"{who} changes the logits of the cross-entropy: leave loss= out")


def require_mixable(who: str, setup: SetupView) -> None:
    """Raise an error if the loss smooths labels: the loss of a mixed label must be the mixture of the losses."""
    if getattr(setup.criterion, "label_smoothing", 0):
        raise InputError(f"{who} mixes labels, which softens them already: give a loss without label_smoothing")


def require_sgd(who: str, setup: SetupView, what: str) -> None:
    """Raise an error unless an update is a sum of gradients; `what` is the quantity that is made of it."""
    optimizer = optimizer_of(setup.experiment)
    if not optimizer.linear:
        raise InputError(
            f"{who} takes {what} from updates that are sums of gradients, as those of optimizer='sgd' are and those of "
            f"{str(optimizer)!r} are not"
        )


def differs(update: Update, part: str, name: str, true: float) -> str | None:
    """What is wrong with a number that a client computed from its update and sent, if it is not `true`."""
    sent = update.sent.get(part, {})
    told = float(sent[name]) if name in sent else true
    return (
        None if abs(told - true) <= 1e-3 * true + 1e-12 else f"{name}={told:g} with an update whose value is {true:g}"
    )
