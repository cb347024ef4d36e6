"""Parts that record metrics during a run and change nothing (`fedflat run --watch drift,gsnr`).

Metrics of a client are taken at the weights it sends, on its own training data, and go into its row of `clients.jsonl`.
Metrics of a round go into the round's metrics, with the time that all this takes as `watch_seconds`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedflat.analysis.curvature import curvature
from fedflat.analysis.features import feature_norm
from fedflat.analysis.signal import gsnr
from fedflat.core.inputs import concatenated
from fedflat.core.part import Part
from fedflat.core.rows import dots, norms
from fedflat.core.samples import Samples
from fedflat.core.views import Local, Server, SetupView
from fedflat.errors import InputError, UnknownNameError

log = logging.getLogger(__name__)
SAMPLES = 200  # per client at most, for the costly observers
FEW, MANY, WHOLE = 50, 1000, 500  # samples per client, clients, and samples at which the global model is looked at


@dataclass(frozen=True)
class Observer(Part):
    """A part that only records, in every round that `every` divides and in the last."""

    rank: ClassVar[int] = 100
    every: int = 1

    def due(self, round: int, rounds: int) -> bool:
        """Whether metrics are recorded in this round."""
        return round % self.every == 0 or round == rounds


@dataclass(frozen=True)
class ClientObserver(Observer):
    """An observer of what every client sends; it looks at one client of a stack at a time."""

    stacks: ClassVar[bool] = True

    def client_metrics(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        if not self.due(local.round, local.rounds):
            return {}
        try:
            return self.look(setup, local, samples)
        except InputError as error:  # a metric that cannot be computed stops no run
            log.warning("no %s of client %d in round %d: %s", self.name, local.client, local.round, error)
            return {}

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        """Metrics of one client."""
        return {}


@dataclass(frozen=True)
class Drift(ClientObserver):
    """How the clients' models diverge: cosine to the received model and norm of each; diversity and consistency.

    consistency = Σ p_m ‖Δ_m‖²,  centred: minus ‖Σ p_m Δ_m‖²,  diversity = consistency / ‖Σ p_m Δ_m‖²
    """

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        norm = local.theta.norm().item()
        cosine = torch.dot(local.theta, local.given).item() / (norm * local.given.norm().item() + 1e-30)
        return {"cosine": cosine, "norm": norm}

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        if not rows or not self.due(server.round, server.rounds):
            return {}
        weights = [1.0 if server.uniform else float(row["samples"]) for row in rows]
        consistency = sum(w * row["update_norm"] ** 2 for w, row in zip(weights, rows, strict=True)) / sum(weights)
        common = server.delta.norm().item() ** 2
        return {
            "consistency": consistency,
            "consistency_centred": consistency - common,
            "drift_diversity": consistency / common if common else float("nan"),
        }


@dataclass(frozen=True)
class GSNR(ClientObserver):
    """Gradient signal-to-noise ratio of every client's model on its data: sum and mean over the weights (FedCONST)."""

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        found = gsnr(setup.model, some(setup, samples), loss=setup.criterion)
        return {"gsnr_sum": found.total, "gsnr_mean": found.average}


@dataclass(frozen=True)
class GSNRFirst(ClientObserver):
    """The same at the weights received, before the first local step (FedCONST paper, fig. 14a)."""

    name: ClassVar[str] = "gsnr_first"

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        with setup.model.loaded(local.given):
            found = gsnr(setup.model, some(setup, samples), loss=setup.criterion)
        return {"gsnr_first_sum": found.total, "gsnr_first_mean": found.average}


@dataclass(frozen=True)
class EpochNorms(ClientObserver):
    """Norm of a client's weights and their cosine to the received ones after each local epoch (FedCONST, fig. 15)."""

    name: ClassVar[str] = "epoch_norms"
    stacks: ClassVar[bool] = False  # it counts one client's steps

    def constrain_weights(self, local: Local) -> None:
        if not self.due(local.round, local.rounds):
            return
        found: dict[str, Any] = local.scratch(self)
        found["steps"] = found.get("steps", 0) + 1
        size = local.experiment.batch_size or local.samples
        per_epoch = local.samples // size if local.experiment.drop_last else -(-local.samples // size)
        if found["steps"] % per_epoch == 0:
            epoch, norm = found["steps"] // per_epoch, norms(local.theta).item()
            cosine = dots(local.theta, local.given).item() / (norm * norms(local.given).item() + 1e-30)
            found.setdefault("epochs", {}).update({f"norm_epoch_{epoch}": norm, f"cosine_epoch_{epoch}": cosine})

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        epochs: dict[str, float] = local.scratch(self).get("epochs", {})
        return epochs


@dataclass(frozen=True)
class ClientCurvature(ClientObserver):
    """Largest Hessian eigenvalue of every client's model on its own data, whenever it trains (FedASAM, fig. 4)."""

    name: ClassVar[str] = "client_curvature"

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        found = curvature(setup.model, some(setup, samples), k=1, trace=False, loss=setup.criterion)
        return {"lambda_max": float(found.eigenvalues[0])}


@dataclass(frozen=True)
class FeatureNorms(ClientObserver):
    """Mean norm of the outputs of every participant's trained model on its own data."""

    name: ClassVar[str] = "feature_norms"

    def look(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        return {"feature_norm": feature_norm(setup.model, some(setup, samples), loss=setup.criterion)}


@dataclass(frozen=True)
class GlobalObserver(Observer):
    """An observer of the server's model after the round, on data of all clients."""

    def check(self, setup: SetupView) -> None:
        self.require(
            not setup.private.splits, "part of the network stays with the clients, so there is no global model"
        )

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        if not self.due(server.round, server.rounds):
            return {}
        with setup.model.loaded(server.theta, server.buffers):
            return self.look_at_model(setup)

    def look_at_model(self, setup: SetupView) -> Mapping[str, float]:
        """Metrics of the model, whose weights are loaded."""
        return {}


def spaced(setup: SetupView, most: int) -> list[int]:
    """All clients, or `most` evenly spaced ones."""
    chosen: list[int] = torch.linspace(0, setup.clients - 1, min(most, setup.clients)).round().int().tolist()
    return chosen


@dataclass(frozen=True)
class GlobalFeatureNorms(GlobalObserver):
    """Norm of the global model's outputs on the data of all clients (FedASAM paper, fig. 7).

    A mean over the samples of each client; recorded are mean, deviation, lowest and highest over the clients. Looks at
    `FEW` samples of each client and at `MANY` evenly spaced clients at most.
    """

    name: ClassVar[str] = "global_feature_norms"

    def look_at_model(self, setup: SetupView) -> Mapping[str, float]:
        data = (some(setup, setup.federation.samples(client), FEW) for client in spaced(setup, MANY))
        each = torch.tensor([feature_norm(setup.model, own, loss=setup.criterion) for own in data])
        spread = each.std().item() if len(each) > 1 else 0.0
        found = {"": each.mean().item(), "_std": spread, "_lowest": each.min().item(), "_highest": each.max().item()}
        return {f"global_feature_norm{suffix}": value for suffix, value in found.items()}


@dataclass(frozen=True)
class GlobalCurvature(GlobalObserver):
    """λ max and trace of the global model's Hessian, and its training loss: to compare models at equal training loss.

    On about `WHOLE` samples of evenly spaced clients, always the same ones.
    """

    name: ClassVar[str] = "global_curvature"

    def look_at_model(self, setup: SetupView) -> Mapping[str, float]:
        chosen = spaced(setup, FEW)
        each = -(-WHOLE // len(chosen))
        pairs = [some(setup, setup.federation.samples(client), each) for client in chosen]
        data = concatenated([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        found = curvature(setup.model, data, k=1, loss=setup.criterion, seed=setup.experiment.seed)
        values = {"lambda_max": found.extremes[0], "trace": found.trace, "train_loss": found.conditions.loss}
        return {f"global_{name}": value for name, value in values.items() if value is not None}


def some(setup: SetupView, samples: Samples, count: int = SAMPLES) -> tuple[Any, Tensor]:
    """Up to `count` samples of a client, evenly spaced, as the model gets them in evaluation."""
    positions = torch.linspace(0, len(samples) - 1, min(count, len(samples))).round().long()
    x, y = samples.batch(positions)
    return setup.federation.preprocess(x, None, setup.model.theta.dtype), y


OBSERVERS: dict[str, type[Observer]] = {
    part.name: part
    for part in (
        *(Drift, GSNR, GSNRFirst, EpochNorms, ClientCurvature, FeatureNorms),
        *(GlobalFeatureNorms, GlobalCurvature),
    )
}
INTERFERENCE = "interference"
"""Not a part: every client is evaluated on its own test data in the rounds that `every` selects."""


def observers(names: Sequence[str], every: int = 1) -> list[Part]:
    """The observers of these names, which record in every round that `every` divides and in the last."""
    if every < 1:
        raise InputError(f"watch_every must be 1 or more, got {every}")
    for name in names:
        if name not in (*OBSERVERS, INTERFERENCE):
            raise UnknownNameError("observer", name, [*OBSERVERS, INTERFERENCE])
    return [OBSERVERS[name](every) for name in dict.fromkeys(names) if name in OBSERVERS]
