"""MAN: minimise layer-wise activation norms (paper 000)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedflat.method import Local, Part

if TYPE_CHECKING:
    from fedflat.task import Task

log = logging.getLogger(__name__)
IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}
BOUNDED = {F.relu6}  # counted too, without the fused backward pass
RELUS = {F.relu, torch.relu, Tensor.relu} | IN_PLACE


@dataclass(frozen=True)
class MAN(Part):
    """Penalise the mean square of every hidden activation; by the paper's bound this flattens each layer's Hessian.

    a_l is the output of the l-th ReLU.

    zeta: ζ, the true multiplier (the authors' flag is twice this); 0 is the base method.
    Every ReLU counts, before pooling; the logits do not. Inside both passes of sharpness-aware gradients.
    Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "L ← L + ζ Σ_l m_l,  m_l = mean of a_l² over batch, channels and positions"
    zeta: float = 0.15

    def __post_init__(self) -> None:
        self.require(self.zeta >= 0, f"zeta must not be negative, got {self.zeta}")

    def check(self, task: Task) -> None:
        """Say so where there seems to be nothing to penalise."""
        if not any(isinstance(module, (nn.ReLU, nn.ReLU6)) for module in task.model.module.modules()):
            log.warning("man: the model has no nn.ReLU; ReLUs called as functions count, other activations do not")

    def watch(self, local: Local) -> AbstractContextManager[Any]:
        """Collect the mean squares of a forward pass."""
        norms: list[Tensor] = []
        local.scratch(self)["norms"] = norms
        return WatchReLU(norms) if self.zeta > 0 else nullcontext()

    def loss(self, local: Local, output: object) -> Tensor | None:
        """ζ times their sum."""
        norms: list[Tensor] = local.scratch(self)["norms"]
        return self.zeta * torch.stack(norms).sum() if norms else None


class WatchReLU(TorchFunctionMode):
    """While active, every ReLU, module or function, leaves the mean square of its output in `norms`."""

    def __init__(self, norms: list[Tensor]) -> None:
        super().__init__()
        self.norms = norms

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace ReLUs, let the rest through."""
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

    One pass backward serves both: where the ReLU is closed its output is 0, and so is the norm's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """max(x, 0) and its mean square."""
        activation = torch.relu(x)
        ctx.save_for_backward(activation)
        return activation, torch.linalg.vector_norm(activation, dtype=_wide(x)).square() / x.numel()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Gradient of both outputs."""
        (activation,) = ctx.saved_tensors
        inner = torch.ops.aten.threshold_backward(grads[0], activation, 0)
        scaled: Tensor = inner.add_(activation, alpha=2 * grads[1].item() / activation.numel())
        return scaled


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
