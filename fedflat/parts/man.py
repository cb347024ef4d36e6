"""MAN: minimise layer-wise activation norms (Yashwanth et al., 2024)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.core.fields import NonNegative
from fedflat.core.part import Part
from fedflat.core.views import Local, SetupView

log = logging.getLogger(__name__)
IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
BOUNDED = {F.relu6}  # counts too, without the fused backward pass
RELUS = {F.relu, torch.relu, Tensor.relu} | IN_PLACE


@dataclass(frozen=True)
class MAN(Part):
    """Penalise the mean square of every hidden activation; by the paper's bound this flattens each layer's Hessian.

    a_l is the output of the l-th ReLU, before pooling. Every ReLU counts; the logits do not. The penalty is part of the
    loss in both passes of sharpness-aware gradients. Keeps nothing; sends 1 down, 1 up.

    Args:
        zeta: ζ, the true multiplier (the authors' flag is twice this); 0 is the base method.
    """

    sample_means: ClassVar[bool] = True
    formula: ClassVar[str] = "L ← L + ζ Σ_l m_l,  m_l = mean of a_l² over batch, channels and positions"
    stacks: ClassVar[bool] = True
    zeta: NonNegative = 0.15

    def check(self, setup: SetupView) -> None:
        if not any(isinstance(module, (nn.ReLU, nn.ReLU6)) for module in setup.model.module.modules()):
            log.warning("man: the model has no nn.ReLU; ReLUs called as functions count, other activations do not")

    def around_forward(self, local: Local) -> AbstractContextManager[Any]:
        norms: list[Tensor] = []
        local.scratch(self)["norms"] = norms
        return WatchReLU(norms) if self.zeta > 0 else nullcontext()

    def loss(self, local: Local, output: object) -> Tensor | None:
        norms: list[Tensor] = local.scratch(self)["norms"]
        return self.zeta * torch.stack(norms).sum() if norms else None


class WatchReLU(TorchFunctionMode):
    """While active, appends the mean square of the output of every ReLU, module or function, to `norms`."""

    def __init__(self, norms: list[Tensor]) -> None:
        super().__init__()
        self.norms = norms

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in RELUS:
            output = func(*args, **kwargs)
            if func in BOUNDED:
                self.norms.append(output.square().mean())
            return output
        x = args[0] if args else kwargs["input"]
        activation, norm = ReLUWithNorm.apply(x)  # type: ignore[no-untyped-call]
        self.norms.append(norm)
        in_place = func in IN_PLACE or kwargs.get("inplace", False) or (len(args) > 1 and args[1])
        return x.copy_(activation) if in_place else activation


class ReLUWithNorm(torch.autograd.Function):
    """ReLU and the mean square of its output.

    One backward pass serves both: where the input is not positive the output is 0, and so is the norm's gradient.
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        activation = torch.relu(x)
        return activation, torch.linalg.vector_norm(activation, dtype=_wide(x)).square() / x.numel()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0])

    @staticmethod
    def vmap(info: Any, places: tuple[int | None, ...], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The same for a stack of clients, by operations that can be differentiated."""
        activation = torch.relu(x.movedim(places[0] or 0, 0))
        return (activation, activation.to(_wide(x)).square().flatten(1).mean(1)), (0, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (activation,) = ctx.saved_tensors
        inner = torch.ops.aten.threshold_backward(grads[0], activation, 0)
        scaled: Tensor = inner.addcmul_(activation, (grads[1] * (2 / activation.numel())).to(inner.dtype))
        return scaled


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
