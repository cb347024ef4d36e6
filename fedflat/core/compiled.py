"""Models that `torch.compile` has wrapped, as plain modules."""

from __future__ import annotations

import copy
import logging

from torch import nn

log = logging.getLogger(__name__)
WRAPPED = "_orig_mod"  # where a compiled module keeps the plain one


def uncompiled(model: nn.Module) -> nn.Module:
    """The model without compilation: itself if nothing in it is compiled, otherwise a copy.

    Compiled code belongs to the process that compiled it. In a forked worker it may wait for ever for threads that
    exist in the parent only.
    """
    compiled = [module for module in model.modules() if _is_compiled(module)]
    if not compiled:
        return model
    log.warning("the model is compiled (torch.compile), which worker processes cannot use: it is trained uncompiled")
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
