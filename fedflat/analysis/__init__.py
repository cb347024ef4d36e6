"""Why a model generalises: curvature, landscapes, gradient statistics, drift and behaviour of any `nn.Module` on data.

>>> import torch
>>> from torch import nn
>>> from fedflat import analysis
>>> model = nn.Linear(3, 2)
>>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
>>> len(analysis.curvature(model, (x, y), k=5).eigenvalues)
5

Data is a pair `(x, y)`, an iterable of such batches, or a map-style dataset. `Protocol` explains the options that all
functions take (loss, max_samples, seed, memory, workers, progress …). No function changes the model.
"""

from __future__ import annotations

from fedflat.analysis.behaviour import (
    Generalisation,
    RoundsToTarget,
    forgetting,
    generalisation,
    per_class_accuracy,
    rounds_to_target,
    tail_average,
)
from fedflat.analysis.calibration import Calibration, calibration, calibration_of
from fedflat.analysis.client_drift import client_consistency, drift_diversity, weight_cosines, weight_norms
from fedflat.analysis.connectivity import Connectivity, connectivity
from fedflat.analysis.corrupted import CORRUPTIONS, Corruption, corrupt
from fedflat.analysis.corruptions import Corruptions, corruptions, corruptions_figure
from fedflat.analysis.cross_client import CrossClient, compare_diagonals, cross_client
from fedflat.analysis.curvature import Curvature, curvature, spectrum
from fedflat.analysis.density import Density, spectral_density
from fedflat.analysis.features import feature_norm, features, nearest_centroid_accuracy, silhouette, tsne
from fedflat.analysis.hvp import hessian_product
from fedflat.analysis.ice import photographed_frost
from fedflat.analysis.lanczos import Eigenpairs, extreme_eigenpairs
from fedflat.analysis.landscape import Landscape, interpolate, landscape_1d, landscape_2d, landscape_plane
from fedflat.analysis.layer_curvature import LayerCurvature, LayerTable, channel_curvature, layer_curvature
from fedflat.analysis.noise import NoiseCurve, noise_curve
from fedflat.analysis.problem import Conditions, Protocol
from fedflat.analysis.pruning import PrunedFeatures, magnitude_mask, pruned, pruned_features
from fedflat.analysis.signal import GradientSignal, gsnr, signal_from_batches
from fedflat.analysis.steps import GradientVariance, Movement, StepRatio, by_movement, gradient_variance, osgr
from fedflat.analysis.trace import TraceEstimate, hessian_diagonal, hessian_trace, hutchinson

__all__ = [
    "CORRUPTIONS",
    "Calibration",
    "Conditions",
    "Connectivity",
    "Corruption",
    "Corruptions",
    "CrossClient",
    "Curvature",
    "Density",
    "Eigenpairs",
    "Generalisation",
    "GradientSignal",
    "GradientVariance",
    "Landscape",
    "LayerCurvature",
    "LayerTable",
    "Movement",
    "NoiseCurve",
    "Protocol",
    "PrunedFeatures",
    "RoundsToTarget",
    "StepRatio",
    "TraceEstimate",
    "by_movement",
    "calibration",
    "calibration_of",
    "channel_curvature",
    "client_consistency",
    "compare_diagonals",
    "connectivity",
    "corrupt",
    "corruptions",
    "corruptions_figure",
    "cross_client",
    "curvature",
    "drift_diversity",
    "extreme_eigenpairs",
    "feature_norm",
    "features",
    "forgetting",
    "generalisation",
    "gradient_variance",
    "gsnr",
    "hessian_diagonal",
    "hessian_product",
    "hessian_trace",
    "hutchinson",
    "interpolate",
    "landscape_1d",
    "landscape_2d",
    "landscape_plane",
    "layer_curvature",
    "magnitude_mask",
    "nearest_centroid_accuracy",
    "noise_curve",
    "osgr",
    "per_class_accuracy",
    "photographed_frost",
    "pruned",
    "pruned_features",
    "rounds_to_target",
    "signal_from_batches",
    "silhouette",
    "spectral_density",
    "spectrum",
    "tail_average",
    "tsne",
    "weight_cosines",
    "weight_norms",
]
