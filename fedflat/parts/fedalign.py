"""FedAlign (Mendieta et al., 2022; paper 001)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import InputError
from fedflat.method import Local, Part
from fedflat.models.slim import leading, slimmed
from fedflat.parts.inputs import two_samples

if TYPE_CHECKING:
    from fedflat.flat import FlatModel
    from fedflat.task import Task

Passed = tuple[Tensor, Tensor]
"""What entered a module, and what left it."""


@dataclass(frozen=True)
class FedAlign(Part):
    """Align the Lipschitz constant of the last stage, run at a reduced width, with that of the whole stage.

    a and b are the last stage's input and output, a averaged over b's grid of S places; a, b and so K_F are held fixed,
    as is the factor sg(L_CE/L_Lip). The spectral norms ‖·‖₂ are found by power iterations.

    mu: μ; 0 is FedAvg. width: ω_S; 1 is FedAvg, too. objective: "official", the authors' code, for which μ was tuned:
    the penalty is always worth μ·L_CE, and left out where L_Lip < 1e-12; or "paper", L + μ·L_Lip.
    slices: "sliced" takes the leading channels a_S of a in X_S as the code does, "full" all of a, as equation 7 says.
    iterations: of the power method, from a vector of ones. divisor: of the numbers of channels left at width ω_S.
    Keeps nothing; sends 1 down, 1 up; one more pass through the last stage at width ω_S.
    The paper trains with lr=0.01, lr_decay=1, momentum=0.9, nesterov=True, weight_decay=1e-4, batch_size=64, clip=10.
    """

    formula: ClassVar[str] = (
        "L ← L + μ sg(L_CE/L_Lip) L_Lip,  L_Lip = mean over the batch of (K_S − K_F)²\n"
        "K_F = ‖aᵀb/S‖₂,  K_S = ‖a_Sᵀb_S/S‖₂,  b_S = last stage of a_S at width ω_S"
    )
    mu: float = 0.45
    width: float = 0.25
    objective: str = "official"
    slices: str = "sliced"
    iterations: int = 10
    divisor: int = 8

    def __post_init__(self) -> None:
        self.require(self.mu >= 0, f"mu must not be negative, got {self.mu}")
        self.require(0 < self.width <= 1, f"width lies above 0 and is at most 1, got {self.width}")
        self.require(self.objective in ("official", "paper"), f"objective is 'official' or 'paper': {self.objective!r}")
        self.require(self.slices in ("sliced", "full"), f"slices is 'sliced' or 'full', not {self.slices!r}")
        self.require(self.iterations >= 1, f"iterations must be at least 1, got {self.iterations}")
        self.require(self.divisor >= 1, f"divisor must be at least 1, got {self.divisor}")

    def check(self, task: Task) -> None:
        """Try it: the last stage must be met on the way, and run at the reduced width."""
        model, seen = task.model, list[Passed]()
        name = model.require_last_stage(self.name)
        model.module.eval()
        with torch.no_grad(), recording(model.submodule(name), seen):
            model(two_samples(task)[0])
        self.require(
            bool(seen) and all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in seen[-1]),
            f"feature maps (channels, height, width) must enter and leave the last stage, which {name!r} does not see; "
            "name another with last_stage='…'",
        )
        try:
            with torch.no_grad():
                self.misfit(model, *seen[-1])
        except RuntimeError as error:
            raise InputError(f"{self.name}: {name!r} does not run at width {self.width:g}: {error}") from error

    def watch(self, local: Local) -> AbstractContextManager[Any]:
        """Note what passes the last stage in this forward pass, and in no other."""
        seen = local.scratch(self)["seen"] = list[Passed]()
        return recording(last_stage(local.model), seen) if self.mu > 0 and self.width < 1 else nullcontext()

    def loss(self, local: Local, output: object) -> Tensor | None:
        """The penalty."""
        seen, data_loss = local.scratch(self)["seen"], local.data_loss
        if not seen or data_loss is None:
            return None
        misfit = self.misfit(local.model, *seen.pop())
        if self.objective == "paper":
            return self.mu * misfit
        return None if misfit.item() < 1e-12 else self.mu * data_loss.item() / misfit.item() * misfit

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
    """`a` averaged over the places of `b`."""
    height, width = b.shape[2:]
    return a if a.shape[2:] == b.shape[2:] else F.adaptive_avg_pool2d(a, (height, width))


def spectral_norm(u: Tensor, v: Tensor, iterations: int) -> Tensor:
    """‖X‖₂ of X = u vᵀ/S for every sample, u (B, C, S) and v (B, D, S): power iterations on G = XXᵀ from ones.

    n = ‖Gx‖, x ← Gx/n; ‖X‖₂ ≈ √n. With fewer places than channels the same is cheaper among the places, on y = uᵀx:
    Gx = uMy with M = vᵀv/S², so n² = (My)ᵀ uᵀu (My) and y ← uᵀu My/n. Where X = 0 the norm is 0, its gradient, too.
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
