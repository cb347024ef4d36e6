"""Pictures of some test samples with prediction and truth, where the task has any; the report shows them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedflat.core.batchnorm import using_batch
from fedflat.engine.setup import Broadcast, Setup

COMMON = "test"  # what the common test set is called
Pictures = dict[str, Tensor]


@torch.no_grad()
def pictures(setup: Setup, evaluated: Callable[[], Broadcast]) -> Pictures:
    """Images (n, channels, height, width) as bytes, predictions and truths (n, height, width), by "test/image" …

    Empty where the task shows nothing, or the samples are no images of the size of what is predicted.

    Args:
        evaluated: Gives the evaluated weights.
    """
    federation, found = setup.federation, Pictures()
    for name in ("", *federation.tests):
        samples = federation.test_set(name)
        positions = federation.task.shown(len(samples)) if samples is not None and not setup.private.splits else []
        if samples is None or not positions:
            continue
        setup.load(evaluated())
        setup.model.module.eval()
        x, y = samples.batch(torch.tensor(positions))
        with using_batch(setup.model.module, setup.private.names):
            drawn = federation.task.drawn(setup.model(federation.preprocess(x, None, setup.model.theta.dtype)), y)
        if drawn is not None and isinstance(x, Tensor) and x.dtype == torch.uint8 and x.shape[-2:] == y.shape[-2:]:
            prediction, truth = (image.to("cpu", torch.int16) for image in drawn)
            own = {"image": x.cpu().contiguous(), "prediction": prediction, "truth": truth}
            found |= {f"{name or COMMON}/{kind}": tensor for kind, tensor in own.items()}
    return found
