"""Keep what the received model knows: FedNTD (Lee et al., 2022) and FedSOL (Lee et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.fields import NonNegative, Positive
from fedflat.core.part import Backward, Part
from fedflat.core.rows import unit
from fedflat.core.samples import IGNORED
from fedflat.core.views import Batch, Local, SetupView
from fedflat.parts.requirements import require_classes


@dataclass(frozen=True)
class FedNTD(Part):
    """Keep the received model's opinion of the classes that are not true, which local data forget.

    q is the softmax over the C − 1 not-true logits divided by τ, q_g the same of the received model in evaluation mode.
    In mixed batches the terms of the labels are mixed; ignored labels have none. In the first step of a round the term
    and its gradient are zero. Keeps nothing; sends 1 down, 1 up; one more forward pass per step.
    The factor τ² is in the authors' code only.

    Args:
        beta: β, the weight of the term; 0 is FedAvg.
        tau: τ, the temperature.
    """

    formula: ClassVar[str] = "L ← L + β τ² mean KL(q_g ‖ q),  q = softmax(z_c / τ over c ≠ y)"
    rank: ClassVar[int] = 5  # asks the received model about the batch as it is in the end
    beta: NonNegative = 1.0
    tau: Positive = 1.0

    def check(self, setup: SetupView) -> None:
        classes = require_classes(self.name, setup)
        self.require(classes >= 3, f"with {classes} classes one is not true, and nothing is left to compare")

    def begin(self, local: Local) -> None:
        remember_buffers(local, self)

    def batch(self, local: Local, batch: Batch) -> Batch:
        if self.beta > 0:
            local.scratch(self)["logits"] = frozen_logits(local, self, batch)
        return batch

    def loss(self, local: Local, output: Any) -> Tensor | None:
        if self.beta == 0:
            return None
        kept = local.scratch(self)["logits"]
        terms = [weight * not_true_divergence(kept, output, y, self.tau) for weight, y in local.batch.targets]
        return self.beta * self.tau**2 * torch.stack(terms).sum()


@dataclass(frozen=True)
class FedSOL(Part):
    """Take the gradient where the local model would most disagree with the received one, so that steps respect both.

    ℓ_p is the divergence of the outputs at temperature T from those of the received model in evaluation mode. While
    both have the same weights, as in the first step of a round, the plain gradient is taken.
    Keeps nothing; sends 1 down, 1 up; two gradients and one more forward pass per step.
    Differs from the authors' code in such steps, where theirs follows rounding errors.

    Args:
        rho: ρ, the length of the perturbation; 0 is FedAvg.
        temperature: T.
        adaptive: Multiply ε by |w_k − w|, each column of a tensor divided by its norm along the first dimension.
    """

    formula: ClassVar[str] = "ε = ρ unit(∇ℓ_p(w_k)),  ℓ_p = mean KL(softmax(z_g/T) ‖ softmax(z/T))\ng ← ∇L(w_k + ε)"
    rank: ClassVar[int] = 5  # asks the received model about the batch as it is in the end
    rho: NonNegative = 1.0
    temperature: Positive = 3.0
    adaptive: bool = False

    def begin(self, local: Local) -> None:
        remember_buffers(local, self)

    def batch(self, local: Local, batch: Batch) -> Batch:
        local.scratch(self)["logits"] = frozen_logits(local, self, batch) if self._perturbs(local) else None
        return batch

    def _perturbs(self, local: Local) -> bool:
        return self.rho > 0 and local.branch == "global" and not local.theta.equal(local.given)

    def gradient(self, local: Local, backward: Backward) -> None:
        kept = local.scratch(self)["logits"]
        if kept is None:
            backward()
            return
        backward(of=lambda output: divergence(kept, output, self.temperature).mean())
        ascent = self.rho * unit(local.grad)
        if self.adaptive:
            ascent.mul_(relative_change(local))
        with local.displaced(by=ascent):
            backward()


def remember_buffers(local: Local, part: Part) -> None:
    """Keep the received statistics for `frozen_logits`."""
    local.scratch(part)["buffers"] = local.model.buffers.clone()


@torch.no_grad()
def frozen_logits(local: Local, part: Part, batch: Batch) -> Tensor:
    """The received model's output on a batch, in evaluation mode; restores the model."""
    model = local.model
    model.module.eval()
    with model.loaded(local.given, local.scratch(part)["buffers"]):
        output: Tensor = model(batch.x)
    model.module.train()
    return output


def divergence(kept: Tensor, output: Tensor, temperature: float) -> Tensor:
    """KL(softmax(kept/T) ‖ softmax(output/T)) over dimension 1, for every sample and position."""
    before, now = (F.log_softmax(logits / temperature, dim=1) for logits in (kept, output))
    return F.kl_div(now, before, reduction="none", log_target=True).sum(1)


def not_true_divergence(kept: Tensor, output: Tensor, y: Tensor, tau: float) -> Tensor:
    """The mean over labels that count of the divergence over all other classes."""
    counted, others = y != IGNORED, torch.arange(output.shape[1] - 1, device=y.device)
    label = torch.where(counted, y, 0).unsqueeze(1)
    others = others.view(1, -1, *[1] * (y.dim() - 1))
    index = others + (others >= label)  # 0 … C − 1 without the label
    apart = divergence(kept.gather(1, index), output.gather(1, index), tau)
    return (apart * counted).sum() / counted.sum().clamp_min(1)


def relative_change(local: Local) -> Tensor:
    """|w_k − w| with every column of each tensor divided by its norm along the first dimension; 0 where that is 0."""
    change = (local.theta - local.given).abs_()
    for span in local.model.spans:
        tensor = span.of(change)
        norm = tensor.norm(dim=0, keepdim=True)
        tensor.div_(torch.where(norm > 0, norm, 1.0))
    return change
