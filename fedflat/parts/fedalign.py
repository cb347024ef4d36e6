"""FedAlign (Mendieta et al., 2022)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.core.fields import Count, NonNegative, PositiveFraction
from fedflat.core.flat import FlatModel
from fedflat.core.part import Part
from fedflat.core.views import Local, SetupView
from fedflat.errors import InputError
from fedflat.models.slim import leading, slimmed
from fedflat.parts.requirements import two_samples

Passed = tuple[Tensor, Tensor]
"""The input and the output of a module."""


@dataclass(frozen=True)
class FedAlign(Part):
    """Align the Lipschitz constant of the last stage, run at a reduced width, with that of the whole stage.

    a and b are the last stage's input and output, a averaged over b's grid of S positions. a, b and therefore K_F are
    held fixed, as is the factor sg(L_CE/L_Lip). The spectral norms ‖·‖₂ are found by power iterations.
    Keeps nothing; sends 1 down, 1 up; one more pass through the last stage at width ω_S.
    The paper trains with lr=0.01, lr_decay=1, momentum=0.9, nesterov=True, weight_decay=1e-4, batch_size=64, clip=10.

    Args:
        mu: μ, the weight of the penalty; 0 is FedAvg.
        width: ω_S; 1 is FedAvg, too.
        objective: "official" is the authors' code, for which μ was tuned: the value of the penalty is always μ·L_CE,
            and it is left out where L_Lip < 1e-12. "paper" is L + μ·L_Lip.
        slices: "sliced" takes the leading channels a_S of a in X_S, as the code does; "full" takes all of a, as
            equation 7 says.
        iterations: The number of power iterations, from a vector of ones.
        divisor: Reduced numbers of channels are rounded to multiples of this; see `fedflat.models.slim.leading`.
    """

    formula: ClassVar[str] = (
        "L ← L + μ sg(L_CE/L_Lip) L_Lip,  L_Lip = mean over the batch of (K_S − K_F)²\n"
        "K_F = ‖aᵀb/S‖₂,  K_S = ‖a_Sᵀb_S/S‖₂,  b_S = last stage of a_S at width ω_S"
    )
    mu: NonNegative = 0.45
    width: PositiveFraction = 0.25
    objective: Literal["official", "paper"] = "official"
    slices: Literal["sliced", "full"] = "sliced"
    iterations: Count = 10
    divisor: Count = 8

    def check(self, setup: SetupView) -> None:
        model, seen = setup.model, list[Passed]()
        name = model.require_last_stage(self.name)
        model.module.eval()
        with torch.no_grad(), recording(model.submodule(name), seen):
            model(two_samples(setup)[0])
        self.require(
            bool(seen) and all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in seen[-1]),
            f"the last stage must map feature maps (channels, height, width) to feature maps, but {name!r} does not; "
            "name another with last_stage='…'",
        )
        try:
            with torch.no_grad():
                self.misfit(model, *seen[-1])
        except RuntimeError as error:
            raise InputError(f"{self.name}: {name!r} does not run at width {self.width:g}: {error}") from error

    def around_forward(self, local: Local) -> AbstractContextManager[Any]:
        # a new list per pass: what other passes leave must not count
        seen = local.scratch(self)["seen"] = list[Passed]()
        return recording(last_stage(local.model), seen) if self.mu > 0 and self.width < 1 else nullcontext()

    def loss(self, local: Local, output: object) -> Tensor | None:
        seen, data_loss = local.scratch(self)["seen"], local.data_loss
        if not seen or data_loss is None:
            return None
        misfit = self.misfit(local.model, *seen.pop())
        if self.objective == "paper":
            return self.mu * misfit
        now = misfit.detach()
        return torch.where(now < 1e-12, 0.0, self.mu * data_loss.detach() / now) * misfit

    def misfit(self, model: FlatModel, entered: Tensor, left: Tensor) -> Tensor:
        """L_Lip, given what entered the last stage and what left it."""
        stage = last_stage(model)
        a, b = (tensor.detach().to(model.theta.dtype) for tensor in (entered, left))
        channels = leading(a.shape[1], self.width, self.divisor)
        with slimmed(stage, self.width, self.divisor):
            reduced = stage(a[:, :channels])
        u = on_grid_of(b, a)
        u_reduced = u[:, :channels] if self.slices == "sliced" else u
        k_full = spectral_norm(u.flatten(2), b.flatten(2), self.iterations)
        k_reduced = spectral_norm(u_reduced.flatten(2), reduced.flatten(2), self.iterations)
        return (k_reduced - k_full).square().mean()


def last_stage(model: FlatModel) -> nn.Module:
    """The module whose input and output are compared."""
    return model.submodule(model.require_last_stage(FedAlign.name))


def recording(stage: nn.Module, seen: list[Passed]) -> AbstractContextManager[Any]:
    """Inside this block the input and the output of every pass through `stage` are added to `seen`."""
    return stage.register_forward_hook(lambda _, inputs, output: seen.append(((*inputs, None)[0], output)))


def on_grid_of(b: Tensor, a: Tensor) -> Tensor:
    """`a` averaged over the positions of `b`."""
    height, width = b.shape[2:]
    return a if a.shape[2:] == b.shape[2:] else F.adaptive_avg_pool2d(a, (height, width))


def spectral_norm(u: Tensor, v: Tensor, iterations: int) -> Tensor:
    """‖X‖₂ of X = u vᵀ/S for every sample, u (B, C, S) and v (B, D, S): power iterations on G = XXᵀ from ones.

    n = ‖Gx‖, x ← Gx/n; ‖X‖₂ ≈ √n. With fewer positions than channels it is cheaper to iterate over positions, on y =
    uᵀx: Gx = uMy with M = vᵀv/S², so n² = (My)ᵀ uᵀu (My) and y ← uᵀu My/n. Where X = 0, the norm and its gradient are
    0.
    """
    _, channels, places = u.shape
    tiny = torch.finfo(u.dtype).tiny
    if channels <= places:
        x = u @ v.mT / places
        gram, vector = x @ x.mT, u.new_ones(len(u), channels, 1)
        for _ in range(iterations):
            image = gram @ vector
            norm = torch.linalg.vector_norm(image, dim=1, keepdim=True).clamp_min(tiny)
            vector = image / norm
    else:
        gram, inner, vector = u.mT @ u, v.mT @ v / places**2, u.sum(1).unsqueeze(2)
        for _ in range(iterations):
            half = inner @ vector
            image = gram @ half
            norm = (half * image).sum(1, keepdim=True).clamp_min(tiny).sqrt()
            vector = image / norm
    constant: Tensor = norm.sqrt().flatten()
    return constant
