"""What is left of a model without its smallest or largest weights (paper 004, fig. 8)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.features import features, nearest_centroid_accuracy, silhouette
from fedflat.analysis.protocol import Options, private_copy
from fedflat.errors import InputError, UnknownNameError
from fedflat.flat import FlatModel

WHICH = ("bottom", "top")


def magnitude_mask(
    model: nn.Module | FlatModel, share: float = 0.2, *, which: str = "bottom", per_layer: bool = False
) -> Tensor:
    """True at the weights to be zeroed, over the trainable parameters as one vector.

    share: of all weights in tensors of two or more dimensions; biases and norms stay. which: the smallest ("bottom")
    or the largest ("top") by |w|, in one ranking, or `per_layer` in one a tensor. Ties go by position, so that
    bottom p and top 1 − p complement each other.
    """
    if which not in WHICH:
        raise UnknownNameError("end of the ranking", which, WHICH)
    if not 0 <= share <= 1:
        raise InputError(f"share must be from 0 to 1, got {share}")
    flat = private_copy(model)
    mask = torch.zeros(flat.size, dtype=torch.bool)
    places = [torch.arange(span.start, span.stop) for span in flat.spans if len(span.shape) > 1]
    for ranked in places if per_layer else [torch.cat(places)] if places else []:
        order = ranked[flat.theta[ranked].abs().argsort(stable=True)]
        bottom = round(share * len(order)) if which == "bottom" else len(order) - round(share * len(order))
        mask[order[:bottom] if which == "bottom" else order[bottom:]] = True
    return mask


def pruned(
    model: nn.Module | FlatModel, share: float = 0.2, *, which: str = "bottom", per_layer: bool = False
) -> nn.Module:
    """A copy of the model with a share of its weights set to zero; see `magnitude_mask`."""
    mask = magnitude_mask(model, share, which=which, per_layer=per_layer)
    module = copy.deepcopy(model.module if isinstance(model, FlatModel) else model)
    start = 0
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter[mask[start : start + parameter.numel()].view(parameter.shape)] = 0
            start += parameter.numel()
    return module


@dataclass(frozen=True)
class PrunedFeatures:
    """How well classes separate in the features of the model, and without some of its weights (paper 004, fig. 8).

    By model ("whole", "without the smallest", "without the largest"): silhouette and nearest-centroid accuracy.
    features: rows and labels; a figure shows some of them by t-SNE where scikit-learn is installed.
    """

    silhouettes: dict[str, float]
    accuracies: dict[str, float]
    features: dict[str, tuple[Tensor, Tensor]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {"silhouettes": self.silhouettes, "accuracies": self.accuracies}

    def plot(self) -> Any:
        """A matplotlib figure: the features in two dimensions."""
        from fedflat.analysis.plots import pruning_figure

        return pruning_figure(self)


def pruned_features(
    model: nn.Module | FlatModel, data: Any, share: float = 0.2, **options: Unpack[Options]
) -> PrunedFeatures:
    """How well classes separate in the penultimate features, with all weights and without a share of them."""
    whole = model.module if isinstance(model, FlatModel) else model
    models = {
        "whole": whole,
        "without the smallest": pruned(model, share, which="bottom"),
        "without the largest": pruned(model, share, which="top"),
    }
    found = {name: features(each, data, **options) for name, each in models.items()}
    return PrunedFeatures(
        {name: silhouette(*rows) for name, rows in found.items()},
        {name: nearest_centroid_accuracy(*rows) for name, rows in found.items()},
        found,
    )
