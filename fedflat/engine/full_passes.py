"""What a part may ask of all samples of a client, besides the minibatches of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedflat.core.samples import IGNORED, Samples
from fedflat.core.views import SetupView
from fedflat.data.samples import labels_of
from fedflat.experiment import Experiment


class FullPasses:
    """Passes over all samples of one client, or of each client of a stack.

    It knows nothing of the `Local` that hands it to the parts: both are freed as soon as a client is done.
    """

    def __init__(self, setup: SetupView, samples: Sequence[Samples]) -> None:
        self.setup, self.samples = setup, samples

    def gradient(self, at: Tensor) -> Tensor:
        """Gradient of the mean data loss over all of the client's samples at the weights `at`, without augmentation."""
        rows = at.reshape(len(self.samples), -1)
        each = [self._gradient(row, samples) for row, samples in zip(rows, self.samples, strict=True)]
        return torch.stack(each).view_as(at)

    def _gradient(self, at: Tensor, samples: Samples) -> Tensor:
        setup, model, count = self.setup, self.setup.model, len(samples)
        total = torch.zeros_like(at)
        with model.loaded(at):
            for chunk in torch.split(torch.arange(count), _at_once(setup.experiment) or count):
                x, y = samples.batch(chunk)
                model.grad.zero_()
                output = model(setup.federation.preprocess(x, None, at.dtype))
                setup.criterion(output, y).backward()  # type: ignore[no-untyped-call]
                total.add_(model.grad, alpha=len(chunk) / count)
        return total

    def loss(self, at: Tensor) -> Tensor:
        """Mean data loss over all of the client's samples at the weights `at`, in evaluation mode, not augmented."""
        rows = at.reshape(len(self.samples), -1)
        each = [self._loss(row, samples) for row, samples in zip(rows, self.samples, strict=True)]
        return each[0] if at.dim() == 1 else torch.stack(each).unsqueeze(1)

    @torch.no_grad()
    def _loss(self, at: Tensor, samples: Samples) -> Tensor:
        model, setup, count = self.setup.model, self.setup, len(samples)
        total = at.new_zeros((), dtype=torch.float64)
        model.module.eval()
        with model.loaded(at):
            for chunk in torch.split(torch.arange(count), _at_once(setup.experiment) or count):
                x, y = samples.batch(chunk)
                output = model(setup.federation.preprocess(x, None, model.theta.dtype))
                total.add_(setup.criterion(output, y), alpha=len(chunk) / count)
        model.module.train()
        return total

    def label_counts(self, classes: int) -> Tensor:
        """How many of the client's training targets belong to each class; ignored ones do not count."""
        labels = [labels_of(samples).reshape(-1) for samples in self.samples]
        counts = [torch.bincount(own[own != IGNORED], minlength=classes) for own in labels]
        return torch.stack(counts) if len(counts) > 1 else counts[0]


def _at_once(e: Experiment) -> int:
    """How many samples pass the network at once; 0: all."""
    return e.microbatch or e.batch_size
