"""Where a minibatch may be passed through the network in pieces (`Experiment.microbatch`), and where not."""

from __future__ import annotations

import torch

from fedflat.core.batchnorm import batchnorms
from fedflat.core.part import fills
from fedflat.core.views import Batch
from fedflat.engine.minibatches import pieces
from fedflat.engine.setup import Setup
from fedflat.errors import InputError

TERMS = ("loss", "further_losses", "around_forward")
"""Slots whose terms may be more than means over samples."""


def check_pieces(setup: Setup) -> None:
    """Refuse `microbatch` where the loss of a minibatch is no mean of the losses of its pieces."""
    if setup.experiment.microbatch is None:
        return
    for part in setup.parts:
        if any(fills(part, slot) for slot in TERMS) and not part.sample_means:
            raise InputError(f"microbatch: the term that {part.name} adds to the loss is made of the whole minibatch")
    setup.model.module.train()
    for name, layer in batchnorms(setup.model.module):
        if layer.training:
            raise InputError(
                f"microbatch: {name} ({type(layer).__name__}) normalises by the statistics of what passes it together; "
                "take a model with GroupNorm or LayerNorm, or one that keeps this layer in evaluation mode"
            )
    _check_loss(setup)


@torch.no_grad()
def _check_loss(setup: Setup) -> None:
    samples = setup.federation.samples(0)
    x, y = samples.batch(torch.arange(min(4, len(samples))))
    setup.model.module.eval()
    try:
        output = setup.model(setup.federation.preprocess(x, None, setup.model.theta.dtype))
        whole = setup.criterion(output, y)
        cut = [share * setup.criterion(b.x, b.targets[0][1]) for b, share in pieces(Batch(output, ((1.0, y),)), 1)]
    except Exception:  # an own loss may take anything; training will tell
        return
    if cut and not torch.allclose(torch.stack(cut).sum(), whole, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise InputError("microbatch: the loss is no mean over samples, and pieces of a minibatch cannot be added up")
