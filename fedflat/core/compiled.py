"""`torch.compile`: networks compiled in the process that uses them, and plain modules of those that a user compiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fedflat.errors import InputError

log = logging.getLogger(__name__)
WRAPPED = "_orig_mod"  # where a compiled module keeps the plain one


def compiled(module: nn.Module, mode: str) -> Callable[[Any], Any]:
    """The forward pass of a module, which is compiled when it is first called; the module stays as it is.

    Args:
        module: The network. Its weights may be changed in place at any time, its layers and hooks not.
        mode: That of `torch.compile`; "reduce-overhead" replays CUDA graphs.
    """
    import torch._inductor.config as settings

    settings.compile_threads = 1  # helpers of the compiler would outlive a worker that is killed
    settings.fallback_random = True  # dropout draws what it draws without compilation
    return torch.compile(module, mode=mode)


def check_compiler(kind: str, mode: str) -> None:
    """Refuse to compile for this kind of device where the compiler is missing."""
    if kind == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise InputError(
                f"compile={mode!r} needs a C++ compiler, such as g++: install one, or compile='none'"
            ) from None
    elif find_spec("triton") is None:
        raise InputError(f"compile={mode!r} on {kind} needs triton: pip install triton, or compile='none'")


def uncompiled(model: nn.Module) -> nn.Module:
    """The model without compilation: itself if nothing in it is compiled, otherwise a copy.

    Compiled code belongs to the process that compiled it. In a forked worker it may wait for ever for threads that
    exist in the parent only.
    """
    compiled = [module for module in model.modules() if _is_compiled(module)]
    if not compiled:
        return model
    log.warning(
        "the model is compiled (torch.compile), which worker processes cannot use: it is trained uncompiled; "
        "compile='default' has every worker compile it"
    )
    plain: nn.Module = getattr(model, WRAPPED, model)
    saved = [(module, module._compiled_call_impl) for module in plain.modules()]
    try:
        for module, _ in saved:
            module._compiled_call_impl = None  # compiled functions cannot be copied
        plain = copy.deepcopy(plain)
    finally:
        for module, call in saved:
            module._compiled_call_impl = call
    for module in list(plain.modules()):
        for name, child in module.named_children():
            setattr(module, name, getattr(child, WRAPPED, child))
    return plain


def _is_compiled(module: nn.Module) -> bool:
    return WRAPPED in module._modules or module._compiled_call_impl is not None
