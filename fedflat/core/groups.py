"""Groups of parameters by layer, for layer-wise curvature and personal layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedflat.core.flat import FlatModel, Span
from fedflat.errors import UnknownNameError

GRANULARITIES = ("weight", "module", "tensor")
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
WEIGHTS = (_ConvNd, nn.Linear)


@dataclass(frozen=True)
class Group:
    """A group of parameters.

    Args:
        name: The layer or tensor.
        module: The layer whose input the group acts on.
        spans: The tensors.
    """

    name: str
    module: str
    spans: tuple[Span, ...]

    @property
    def owners(self) -> frozenset[str]:
        """The modules that own the parameters; their buffers belong to the group as well."""
        return frozenset(_owner(span) for span in self.spans)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(span.stop - span.start for span in self.spans)


def layer_groups(flat: FlatModel, granularity: str = "weight") -> list[Group]:
    """All trainable parameters in groups.

    Args:
        flat: The model.
        granularity: "weight" makes one group per convolution or linear layer, together with the normalisation that
            follows it (in pre-activation networks: that precedes it); "module" one group per module with parameters
            of its own; "tensor" one group per tensor.
    """
    if granularity not in GRANULARITIES:
        raise UnknownNameError("granularity", granularity, GRANULARITIES)
    if granularity == "tensor":
        return [Group(span.name, _owner(span), (span,)) for span in flat.spans]
    owners = list(dict.fromkeys(_owner(span) for span in flat.spans))
    heads = _heads(flat, owners) if granularity == "weight" else {name: name for name in owners}
    members: dict[str, list[Span]] = {heads[name]: [] for name in owners}
    for span in flat.spans:
        members[heads[_owner(span)]].append(span)
    return [Group(name, name, tuple(spans)) for name, spans in members.items()]


def _owner(span: Span) -> str:
    return span.name.rpartition(".")[0]


def _heads(flat: FlatModel, owners: list[str]) -> dict[str, str]:
    """The layer whose group each module's parameters join."""
    modules = {name: flat.module.get_submodule(name) for name in owners}
    heads = {name: name for name in owners}
    first = _normalises_first(owners, modules)
    for place, name in enumerate(owners):
        if isinstance(modules[name], NORMS):
            before = owners[place - 1] if place else None
            after = next((other for other in owners[place + 1 :] if isinstance(modules[other], WEIGHTS)), None)
            fed = before is not None and isinstance(modules[before], WEIGHTS) and _fits(modules[before], modules[name])
            if before is not None and fed and not (first and after is not None):
                heads[name] = before
            elif after is not None:
                heads[name] = after
    return heads


def _normalises_first(owners: list[str], modules: dict[str, nn.Module]) -> bool:
    """Whether the block of the last layer begins with a normalisation, as in pre-activation networks."""
    weights = [name for name in owners if isinstance(modules[name], WEIGHTS)]
    place = owners.index(weights[-1]) if weights else 0
    if place < 2 or not isinstance(modules[owners[place - 1]], NORMS):
        return False
    return (
        owners[place - 1].rpartition(".")[0] == weights[-1].rpartition(".")[0] != owners[place - 2].rpartition(".")[0]
    )


def _fits(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether a normalisation has as many channels as the layer has outputs."""
    weight, scale = getattr(layer, "weight", None), getattr(norm, "weight", None)
    return weight is not None and scale is not None and scale.numel() == weight.shape[0]
