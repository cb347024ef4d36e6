"""What may be recorded during a run by naming it (`fedflat run --watch drift,gsnr`): looks, and changes nothing.

Figures of a client, at the weights it sends and on its own training data, go into its row of `clients.jsonl`; figures
of a round into its metrics. What looking costs is there as well, as `watch_seconds`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedflat.errors import InputError, UnknownNameError
from fedflat.method import Local, Part, Server

if TYPE_CHECKING:
    from fedflat.data import Samples
    from fedflat.task import Task

log = logging.getLogger(__name__)
SAMPLES = 200  # of a client's, at most, that the costly observers look at


@dataclass(frozen=True)
class Observer(Part):
    """A part that only looks, in every round that `every` divides, and in the last."""

    rank: ClassVar[int] = 100
    every: int = 1

    def due(self, round: int, rounds: int) -> bool:
        """Whether this round is looked at."""
        return round % self.every == 0 or round == rounds

    def observe(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Figures of a client, in the rounds that are due; none where it cannot be looked at, which stops no run."""
        if not self.due(local.round, local.rounds):
            return {}
        try:
            return self.look(task, local, samples)
        except InputError as error:
            log.warning("no %s of client %d in round %d: %s", self.name, local.client, local.round, error)
            return {}

    def look(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Figures of a client."""
        return {}


@dataclass(frozen=True)
class Drift(Observer):
    """How the clients' models part: cosine to the model received and length of each; diversity and consistency.

    consistency = Σ p_m ‖Δ_m‖²,  centred: less ‖Σ p_m Δ_m‖²,  diversity = consistency / ‖Σ p_m Δ_m‖²
    """

    def look(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Cosine and length of the client's model."""
        norm = local.theta.norm().item()
        cosine = torch.dot(local.theta, local.origin).item() / (norm * local.origin.norm().item() + 1e-30)
        return {"cosine": cosine, "norm": norm}

    def remark(self, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        """Diversity and consistency of the round."""
        if not rows or not self.due(server.round, server.rounds):
            return {}
        weights = [1.0 if server.uniform else float(row["samples"]) for row in rows]
        literal = sum(w * row["update_norm"] ** 2 for w, row in zip(weights, rows, strict=True)) / sum(weights)
        common = server.delta.norm().item() ** 2
        return {
            "consistency": literal,
            "consistency_centred": literal - common,
            "drift_diversity": literal / common if common else float("nan"),
        }


@dataclass(frozen=True)
class GSNR(Observer):
    """Gradient signal-to-noise ratio of every client's model on its data: sum and mean over the weights (paper 004)."""

    def look(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Sum and mean of ḡ²/s²."""
        from fedflat.analysis import gsnr

        found = gsnr(task.model, some(task, samples), loss=task.criterion)
        return {"gsnr_sum": found.total, "gsnr_mean": found.average}


@dataclass(frozen=True)
class ClientCurvature(Observer):
    """Largest Hessian eigenvalue of every client's model on its own data, whenever it trains (paper 003, fig. 4)."""

    name: ClassVar[str] = "client_curvature"

    def look(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """λ_max."""
        from fedflat.analysis import curvature

        found = curvature(task.model, some(task, samples), k=1, trace=False, loss=task.criterion)
        return {"lambda_max": float(found.eigenvalues[0])}


@dataclass(frozen=True)
class FeatureNorms(Observer):
    """Mean length of the model's outputs on every client's data (paper 003, fig. 7)."""

    name: ClassVar[str] = "feature_norms"

    def look(self, task: Task, local: Local, samples: Samples) -> Mapping[str, float]:
        """Mean norm of the logits."""
        from fedflat.analysis import feature_norm

        return {"feature_norm": feature_norm(task.model, some(task, samples), loss=task.criterion)}


def some(task: Task, samples: Samples) -> tuple[Any, Tensor]:
    """Up to `SAMPLES` of a client's samples, spread evenly, as the model gets them in evaluation."""
    positions = torch.linspace(0, len(samples) - 1, min(SAMPLES, len(samples))).round().long()
    x, y = samples.batch(positions)
    return task.federation.preprocess(x, None, task.model.theta.dtype), y


OBSERVERS: dict[str, type[Observer]] = {part.name: part for part in (Drift, GSNR, ClientCurvature, FeatureNorms)}
INTERFERENCE = "interference"
"""Not a part: it has every client evaluated on its own test data in the rounds that are watched."""


def observers(names: Sequence[str], every: int = 1) -> list[Part]:
    """The observers of these names, looking in every round that `every` divides."""
    if every < 1:
        raise InputError(f"watch_every must be 1 or more, got {every}")
    for name in names:
        if name not in (*OBSERVERS, INTERFERENCE):
            raise UnknownNameError("observer", name, [*OBSERVERS, INTERFERENCE])
    return [OBSERVERS[name](every) for name in dict.fromkeys(names) if name in OBSERVERS]
