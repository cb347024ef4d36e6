"""GradAug (Yang et al., 2020), as paper 001 uses it on clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.errors import InputError
from fedflat.flat import FlatModel
from fedflat.method import Batch, Local, Part
from fedflat.models.slim import slimmed
from fedflat.parts.inputs import require_images, two_samples

if TYPE_CHECKING:
    from fedflat.task import Task


@dataclass(frozen=True)
class GradAug(Part):
    """Have slimmed sub-networks reproduce the whole network's answer from smaller images.

    mu: μ; 0 is FedAvg (the paper's: 2, 1.75, 1.5, 1.25 for n = 1 … 4). n: sub-networks. width: ω_b. resolutions: of the
    resized images. all_random: draw every ω_i, as paper 001 says; its code fixes one. divisor: of the channel numbers.
    One draw a minibatch, the same in both passes of sharpness-aware gradients. KL is summed over classes and averaged
    over the batch. Keeps nothing; sends 1 down, 1 up; n more passes, at their widths and resolutions.
    """

    formula: ClassVar[str] = (
        "L ← L + μ Σ_i KL(sg softmax(z) ‖ softmax(z_i)),  i = 1 … n\n"
        "z_i = net at width ω_i of the images resized to r_i × r_i,  ω_1 = ω_b,  other ω_i ~ U(ω_b, 1)"
    )
    mu: float = 1.75
    n: int = 2
    width: float = 0.8
    resolutions: tuple[int, ...] = (32, 28, 24, 20)
    all_random: bool = False
    divisor: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolutions", tuple(self.resolutions))
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")
        self.require(self.n >= 1, f"n must be at least 1, got {self.n}")
        self.require(0 < self.width <= 1, f"width lies above 0 and is at most 1, got {self.width}")
        sizes = self.resolutions
        self.require(bool(sizes) and min(sizes) >= 1, f"resolutions are sizes of images, such as (32, 28), got {sizes}")
        self.require(self.divisor >= 1, f"divisor must be at least 1, got {self.divisor}")

    def check(self, task: Task) -> None:
        """Try it: the network must take images of every resolution, whole and slimmed."""
        _, *sides = require_images(self.name, task)
        largest = max(self.resolutions)
        self.require(
            largest <= min(sides),
            f"resolution {largest} is more than the images' {sides[0]}×{sides[1]}; give resolutions=({min(sides)},)",
        )
        x, _ = two_samples(task)
        task.model.module.eval()
        for size in self.resolutions:
            for width in (1.0, self.width):
                self.try_out(task.model, x, width, size)

    @torch.no_grad()
    def try_out(self, model: FlatModel, x: Tensor, width: float, size: int) -> None:
        """Refuse a network that has no class scores for images of this size."""
        try:
            scores = self.scores(model, x, width, size)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.name}: the network does not take images of {size}×{size} at width {width:g} ({error}); "
                f"give only resolutions that it takes, such as resolutions=({min(x.shape[2:])},)"
            ) from error
        self.require(scores.dim() == 2, f"needs one row of class scores an image, got {tuple(scores.shape[1:])}")

    def batch(self, local: Local, batch: Batch) -> Batch:
        """Draw the sub-networks' widths, in descending order, and resolutions."""
        rng, fixed = local.numpy_stream(self.name), 0 if self.all_random else 1
        widths = sorted([self.width] * fixed + rng.uniform(self.width, 1, self.n - fixed).tolist(), reverse=True)
        sizes = rng.choice(self.resolutions, self.n).tolist()
        local.scratch(self)["draws"] = list(zip(widths, sizes, strict=True))
        return batch

    def loss(self, local: Local, output: Tensor) -> Tensor | None:
        """The distillation terms. Each adds its gradient at once, so that one sub-network's activations are held."""
        if self.mu > 0:
            teacher, x = output.detach().softmax(1), local.batch.x
            for draw in local.scratch(self)["draws"]:
                student = self.scores(local.model, x, *draw).log_softmax(1)
                (self.mu * F.kl_div(student, teacher, reduction="batchmean")).backward()  # type: ignore[no-untyped-call]
        return None

    def scores(self, model: FlatModel, x: Tensor, width: float, size: int) -> Tensor:
        """z_i: class scores at a width, of images resized to a resolution."""
        if x.shape[2:] != (size, size):
            x = F.interpolate(x, (size, size), mode="bilinear", align_corners=True)
        with slimmed(model.module, width, self.divisor, whole=[model.require_head(self.name)]):
            scores: Tensor = model(x)
        model.take_features()  # a sub-network's are of no use to other parts
        return scores
