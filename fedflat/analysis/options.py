"""Options that every analysis takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from torch import Tensor
from torch.nn import functional as F

from fedflat.analysis.progress import Progress
from fedflat.errors import InputError, UnknownNameError

Loss = Callable[[Any, Tensor], Tensor]


class Options(TypedDict, total=False):
    """Options that every analysis of a model on data takes; `Protocol` explains them."""

    loss: Loss
    bn: str
    max_samples: int | None
    seed: int
    batch_size: int | None
    memory: float
    workers: int
    progress: Progress


@dataclass(frozen=True)
class Protocol:
    """How a model is looked at.

    loss: mean loss of (output, labels), without penalties; cross-entropy.
    bn: "running" statistics of BatchNorm, or those of each "batch", of which nothing is tracked.
    max_samples: look at a fixed random subset of so many samples.
    seed: of that subset and of random probes and directions.
    batch_size: samples at a time, at most: data are cut into equal batches. None chooses by `memory`. Results depend on
        it by rounding only, but for bn="batch" and `gradient_variance`.
    memory: GiB that activations may take. Batches are cut to fit, and what is needed again at every Hessian product
        is kept where there is room, which makes products faster by half. Vectors of the model's size come on top.
    workers: processes of one thread; 1 computes in this one, 0 uses every core. The result does not depend on it.
    progress: True shows a bar on stderr; a function is called with the steps done and in total.
    """

    loss: Loss = F.cross_entropy
    bn: str = "running"
    max_samples: int | None = None
    seed: int = 0
    batch_size: int | None = None
    memory: float = 2.0
    workers: int = 1
    progress: Progress = False

    def __post_init__(self) -> None:
        if self.bn not in ("running", "batch"):
            raise UnknownNameError("bn", self.bn, ("running", "batch"))
        if not 0 < self.memory < math.inf:
            raise InputError(f"memory must be a positive number of GiB, got {self.memory}")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.workers < 0:
            raise InputError(f"workers must not be negative, got {self.workers}")

    @classmethod
    def of(cls, options: Options) -> Protocol:
        """A protocol of keywords, or an error that names the nearest known one."""
        known = [entry.name for entry in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownNameError("option", name, known)
        return cls(**options)
