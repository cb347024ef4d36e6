"""GradAug (Yang et al., 2020), as the FedAlign paper uses it on clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedflat.core.fields import Count, NonNegative, PositiveFraction
from fedflat.core.flat import FlatModel
from fedflat.core.part import Part
from fedflat.core.views import Batch, Local, SetupView
from fedflat.errors import InputError
from fedflat.models.slim import slimmed
from fedflat.parts.requirements import require_images, two_samples

COST_WIDTHS = 16  # widths that stand for the uniform distribution in `cost_variants`


@dataclass(frozen=True)
class GradAug(Part):
    """Train slimmed sub-networks to reproduce the whole network's output from smaller images.

    Widths and resolutions are drawn once per minibatch, for both passes of sharpness-aware gradients. KL is summed over
    classes and averaged over the batch.
    Keeps nothing; sends 1 down, 1 up; n more passes, at their widths and resolutions.

    Args:
        mu: μ, the weight of the KL terms; 0 is FedAvg. The paper takes 2, 1.75, 1.5, 1.25 for n = 1 … 4.
        n: The number of sub-networks.
        width: ω_b, the smallest width.
        resolutions: The sizes r_i that resized images may have.
        all_random: Draw every ω_i, as the FedAlign paper says; its code fixes one.
        divisor: Reduced numbers of channels are rounded to multiples of this; see `fedflat.models.slim.leading`.
    """

    formula: ClassVar[str] = (
        "L ← L + μ Σ_i KL(sg softmax(z) ‖ softmax(z_i)),  i = 1 … n\n"
        "z_i = net at width ω_i of the images resized to r_i × r_i,  ω_1 = ω_b,  other ω_i ~ U(ω_b, 1)"
    )
    mu: NonNegative = 1.75
    n: Count = 2
    width: PositiveFraction = 0.8
    resolutions: tuple[int, ...] = (32, 28, 24, 20)
    all_random: bool = False
    divisor: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "resolutions", tuple(self.resolutions))
        sizes = self.resolutions
        self.require(bool(sizes) and min(sizes) >= 1, f"resolutions are sizes of images, such as (32, 28), got {sizes}")

    def check(self, setup: SetupView) -> None:
        _, *sides = require_images(self.name, setup)
        largest = max(self.resolutions)
        self.require(
            largest <= min(sides),
            f"resolution {largest} is more than the images' {sides[0]}×{sides[1]}; give resolutions=({min(sides)},)",
        )
        x, _ = two_samples(setup)
        # only a trial shows whether the network takes images of every resolution, whole and slimmed
        setup.model.module.eval()
        for size in self.resolutions:
            for width in (1.0, self.width):
                self.try_out(setup.model, x, width, size)

    @torch.no_grad()
    def try_out(self, model: FlatModel, x: Tensor, width: float, size: int) -> None:
        """Raise an error where the network has no class scores for images of this size."""
        try:
            scores = self.scores(model, x, width, size)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.name}: the network does not take images of {size}×{size} at width {width:g} ({error}); "
                f"give only resolutions that it takes, such as resolutions=({min(x.shape[2:])},)"
            ) from error
        self.require(scores.dim() == 2, f"needs one row of class scores per image, got {tuple(scores.shape[1:])}")

    def batch(self, local: Local, batch: Batch) -> Batch:
        rng, fixed = local.numpy_stream(self.name), 0 if self.all_random else 1
        widths = sorted([self.width] * fixed + rng.uniform(self.width, 1, self.n - fixed).tolist(), reverse=True)
        sizes = rng.choice(self.resolutions, self.n).tolist()
        local.scratch(self)["draws"] = list(zip(widths, sizes, strict=True))
        return batch

    def cost_variants(self) -> Sequence[tuple[float, Part]]:
        """No sub-networks, those of width ω_b, and those of random width at the middles of equal intervals."""
        spread = [self.width + (1 - self.width) * (i + 0.5) / COST_WIDTHS for i in range(COST_WIDTHS)]
        fixed = 0 if self.all_random else 1
        found, rest = list[tuple[float, Part]](), 1.0
        for widths, count in (([self.width], fixed), (spread, self.n - fixed)):
            draws = tuple(itertools.product(widths, self.resolutions))
            found.append((count / len(draws), FixedGradAug(**vars(self), draws=draws)))
            rest -= count / len(draws)
        return [(rest, FixedGradAug(**vars(self))), *found]

    def further_losses(self, local: Local, output: Tensor) -> Iterator[Tensor]:
        if self.mu > 0:
            teacher, x = output.detach().softmax(1), local.batch.x
            for draw in local.scratch(self)["draws"]:
                student = self.scores(local.model, x, *draw).log_softmax(1)
                yield self.mu * F.kl_div(student, teacher, reduction="batchmean")

    def scores(self, model: FlatModel, x: Tensor, width: float, size: int) -> Tensor:
        """z_i: class scores at a width, of images resized to a resolution."""
        if x.shape[2:] != (size, size):
            # The operation that `F.interpolate` calls. Asked for deterministic algorithms on a device, it would take
            # another one, whose gradient is deterministic; images need none.
            x = torch.ops.aten.upsample_bilinear2d(x, [size, size], True)
        with slimmed(model.module, width, self.divisor, whole=[model.require_head(self.name)]):
            scores: Tensor = model(x)
        model.take_features()  # other parts must not see the features of a sub-network
        return scores


@dataclass(frozen=True)
class FixedGradAug(GradAug):
    """GradAug with the same sub-networks in every step, of widths and sizes `draws`, to measure what they cost."""

    name: ClassVar[str] = GradAug.name
    draws: tuple[tuple[float, int], ...] = ()

    def batch(self, local: Local, batch: Batch) -> Batch:
        local.scratch(self)["draws"] = self.draws
        return batch
