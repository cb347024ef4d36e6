"""Models without their smallest or largest weights (FedCONST paper, fig. 8)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.drawing import dress
from fedflat.analysis.features import features, nearest_centroid_accuracy, silhouette, tsne
from fedflat.analysis.problem import Options, private_copy
from fedflat.core.devices import hosted, on
from fedflat.core.flat import FlatModel
from fedflat.errors import InputError, UnknownNameError
from fedflat.extras import blank_figure

WHICH = ("bottom", "top")


def magnitude_mask(
    model: nn.Module | FlatModel, share: float = 0.2, *, which: str = "bottom", per_layer: bool = False
) -> Tensor:
    """A mask over the trainable parameters as one vector; it is True at the weights to set to zero.

    Ties are broken by position, so that the bottom p and the top 1 − p complement each other.

    Args:
        share: Fraction of the weights in tensors of two or more dimensions; biases and norm layers are kept.
        which: The smallest ("bottom") or the largest ("top") weights by |w|.
        per_layer: Rank the weights per tensor instead of all together.
    """
    if which not in WHICH:
        raise UnknownNameError("end of the ranking", which, WHICH)
    if not 0 <= share <= 1:
        raise InputError(f"share must be from 0 to 1, got {share}")
    flat = private_copy(model)
    theta = hosted(flat.theta)
    mask = torch.zeros(flat.size, dtype=torch.bool)
    places = [torch.arange(span.start, span.stop) for span in flat.spans if len(span.shape) > 1]
    for ranked in places if per_layer else [torch.cat(places)] if places else []:
        order = ranked[theta[ranked].abs().argsort(stable=True)]
        bottom = round(share * len(order)) if which == "bottom" else len(order) - round(share * len(order))
        mask[order[:bottom] if which == "bottom" else order[bottom:]] = True
    return mask


def pruned(
    model: nn.Module | FlatModel, share: float = 0.2, *, which: str = "bottom", per_layer: bool = False
) -> nn.Module:
    """A copy of the model with a fraction of its weights set to zero; see `magnitude_mask`."""
    mask = magnitude_mask(model, share, which=which, per_layer=per_layer)
    module = copy.deepcopy(model.module if isinstance(model, FlatModel) else model)
    start = 0
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.requires_grad):
            own = mask[start : start + parameter.numel()].view(parameter.shape)
            parameter.masked_fill_(on(own, parameter.device), 0)
            start += parameter.numel()
    return module


SHOWN = 500  # samples in a t-SNE figure


@dataclass(frozen=True)
class PrunedFeatures:
    """How well classes separate in the features of a model, with and without some of its weights (FedCONST, fig. 8).

    The keys are "whole", "without the smallest" and "without the largest".

    Attributes:
        silhouettes: Silhouette of the classes.
        accuracies: Nearest-centroid accuracy.
        features: Features, one row per sample, and labels.
    """

    silhouettes: dict[str, float]
    accuracies: dict[str, float]
    features: dict[str, tuple[Tensor, Tensor]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {"silhouettes": self.silhouettes, "accuracies": self.accuracies}

    def plot(self) -> Any:
        """Features of the three models in two dimensions by t-SNE (needs scikit-learn), coloured by class."""
        figure = blank_figure(11, 4)
        axes = figure.subplots(1, len(self.features), squeeze=False)[0]
        for place, (name, (rows, labels)) in zip(axes, self.features.items(), strict=True):
            points = tsne(rows[:SHOWN], perplexity=min(30.0, (len(rows[:SHOWN]) - 1) / 3))
            place.scatter(*points.T.numpy(), c=labels[:SHOWN].numpy(), cmap="tab10", s=6)
            place.set_xticks([])
            place.set_yticks([])
            dress(place, f"{name}\nsilhouette {self.silhouettes[name]:.3f}", "", "")
        return figure


def pruned_features(
    model: nn.Module | FlatModel, data: Any, share: float = 0.2, **options: Unpack[Options]
) -> PrunedFeatures:
    """How well classes separate in the penultimate features, with all weights and without a fraction of them."""
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
