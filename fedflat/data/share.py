"""A share of a data set, such as `cifar10(share=0.2)`: fewer samples per class, drawn by the seed of the run.

Every data set takes two more options. share: the fraction of the training samples of each class that is kept.
judge: "test" scores models on the data set's own test samples; "rest" on training samples that were not drawn, as many
as there are test samples, so that hyper-parameters can be chosen without the test set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedflat.core import streams
from fedflat.data.arrays import Pool, Targets
from fedflat.errors import InputError
from fedflat.specs import Call

JUDGES = ("test", "rest")


@dataclass(frozen=True)
class Share:
    """Which samples of a data set are used; see the module."""

    share: float = 1.0
    judge: str = "test"

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(f"share={self.share!r} of a data set must be a number above 0 and at most 1")
        if self.judge not in JUDGES:
            raise InputError(f"judge={self.judge!r} of a data set must be 'test' or 'rest'")
        if self.judge == "rest" and self.share == 1:
            raise InputError("judge='rest' needs training samples that are not used: give a share below 1")

    def drawn(self, pool: Pool, seed: int) -> Pool:
        """The pool with the drawn samples only, in their old order. Each class keeps at least one."""
        if self.share == 1:
            return pool
        groups = pool.targets.by_class(streams.numpy_stream(seed, "share"))
        counts = [max(1, round(self.share * len(group))) if len(group) else 0 for group in groups]
        kept = np.sort(np.concatenate([group[:count] for group, count in zip(groups, counts, strict=True)]))
        rest = np.concatenate([group[count:] for group, count in zip(groups, counts, strict=True)])
        targets, index = pool.targets, torch.from_numpy(kept)
        writers = None if targets.writers is None else targets.writers[kept]
        small = replace(
            pool,
            x=pool.x[index],
            y=pool.y[index],
            targets=Targets(targets.labels[kept], targets.classes, targets.coarse, writers),
        )
        if self.judge == "test":
            return small
        stream = streams.numpy_stream(seed, "share", 1)
        chosen = torch.from_numpy(np.sort(stream.permutation(rest)[: len(pool.test_y)]))
        return replace(small, test_x=pool.x[chosen], test_y=pool.y[chosen])


def split_call(call: Call) -> tuple[Call, Share]:
    """A data set's call without the options of this module, and these options."""
    own = {name: call.kwargs[name] for name in ("share", "judge") if name in call.kwargs}
    return Call(call.name, call.args, {k: v for k, v in call.kwargs.items() if k not in own}), Share(**own)
