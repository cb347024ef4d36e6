"""IFCA (Ghosh et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedflat.core import streams
from fedflat.core.batchnorm import batchnorms
from fedflat.core.fields import Count
from fedflat.core.flat import FlatModel
from fedflat.core.part import Fit, Part
from fedflat.core.samples import Samples
from fedflat.core.sums import TreeSum
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.errors import InputError

SEVERAL = "'ifca' has several models, and the vectors of the other belong to one"


@dataclass(frozen=True)
class IFCA(Part):
    """Train k models; every client trains the one that fits its data best, and so finds its cluster.

    A client evaluates the losses of all models over its samples and takes the first of the smallest, for training and
    for evaluation. There is no common model: `accuracy` is empty, and a client's own model is the one it would choose
    now. BatchNorm's statistics are common to the models. How many clients chose model j is recorded as `ifca_j`.
    The server keeps the models (k), the client its choice; sends k down, 1 up and a number up; k more passes over the
    client's data per round.
    Differs from the authors' code, which draws the first models again until each is chosen often enough; `starts`
    draws them once, and may be replaced.

    Args:
        k: The number of models; 1 is FedAvg with uniform weights.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "j_i = argmin_j F_i(w^j),  client i trains from w^{j_i}\n"
        "server: w^j ← w^j + mean of Δ_i over the participants with j_i = j"
    )
    rank: ClassVar[int] = -20  # other parts begin at the chosen model
    uniform: ClassVar[bool] = True
    common_model: ClassVar[bool] = False
    needs_mean: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    ignores_server_lr: ClassVar[str] = "the mean of the local models of each cluster"
    alone_in: ClassVar[Mapping[str, str]] = dict.fromkeys(("broadcast", "end_round", "evaluation_weights"), SEVERAL)
    k: Count = 2

    @property
    def fewest_clients(self) -> int:
        """As many as models."""
        return self.k

    def check(self, setup: SetupView) -> None:
        self.require(self.k <= setup.clients, f"k={self.k} models for {setup.clients} clients: lower k")
        keepers = [part.name for part in setup.parts if isinstance(part, Part) and list(part.private(setup.model))]
        kept = f"and with {', '.join(keepers)} some weights stay with the clients"
        self.require(len(setup.private.theta) == 0, f"it compares whole models, {kept}")
        e = setup.experiment
        self.require(self.k == 1 or e.weights is None, "weights= gives one model its start, not k: leave it out")
        recomputes = e.batchnorm == "recompute" and bool(batchnorms(setup.model.module))
        self.require(self.k == 1 or not recomputes, "batchnorm='recompute' makes statistics for one model, not for k")
        starts(setup.model, setup.model.theta, self.k, e.seed)

    def _models(self, server: Server) -> Tensor:
        state = server.state(self)
        if "models" not in state:
            state["models"] = starts(server.model, server.theta, self.k, server.experiment.seed)
        return state["models"]

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        return {"others": self._models(server)[1:].clone()} if self.k > 1 else {}

    def begin(self, local: Local) -> None:
        others, choice = local.received(self).get("others"), 0
        if others is not None:
            models = [local.given, *others]
            choice = int(torch.stack([local.full_loss(model) for model in models]).argmin())
            local.origin = local.given = models[choice].clone()
            local.theta.copy_(local.given)
        local.scratch(self)["choice"] = choice

    def end(self, local: Local) -> None:
        choice = torch.tensor([local.scratch(self)["choice"]])
        local.state(self)["choice"] = choice
        local.send(self, choice=choice.clone())

    def adapt(self, local: Local, fit: Fit) -> None:
        """Nothing to fit: `begin` has chosen the client's model."""

    def inspect(self, setup: SetupView, update: Update) -> str | None:
        choice = int(update.sent.get(self.name, {}).get("choice", torch.zeros(1)))
        return None if 0 <= choice < self.k else f"the choice of model {choice} of {self.k}"

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        sums, weights = [TreeSum[Tensor]() for _ in range(self.k)], [0.0] * self.k
        for update in updates:
            choice = int(update.sent[self.name]["choice"])
            for j, total in enumerate(sums):
                total.add(update.delta * update.weight if j == choice else None)
            weights[choice] += update.weight
        models = self._models(server)
        pairs = zip(sums, weights, strict=True)
        moves = [total.result().div_(weight) if weight else torch.zeros_like(models[0]) for total, weight in pairs]
        server.state(self)["moves"] = torch.stack(moves)  # `step` takes them
        return moves[0]

    def step(self, server: Server, delta: Tensor) -> None:
        state = server.state(self)
        moves = state.pop("moves")
        state["models"] = torch.cat([(server.theta + delta).unsqueeze(0), state["models"][1:] + moves[1:]])
        server.theta = state["models"][0].clone()

    def client_metrics(self, setup: SetupView, local: Local, samples: Samples) -> Mapping[str, float]:
        return {"ifca_choice": local.scratch(self)["choice"]}

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        chosen = [row.get("ifca_choice") for row in rows]
        return {f"ifca_{j}": chosen.count(j) for j in range(self.k)}


def starts(model: FlatModel, first: Tensor, k: int, seed: int) -> Tensor:
    """The k first models, one per row: `first`, and fresh draws of the network's initialiser.

    A network of your own is drawn anew layer by layer, by `reset_parameters`.
    """
    rows = [first.clone()]
    for j in range(1, k):
        with streams.isolated(seed, "init", j):
            module = model.make() if model.make else _redrawn(model)
        parameters = [module.get_parameter(span.name) for span in model.spans]
        rows.append(torch.cat([p.detach().reshape(-1) for p in parameters]).to(first))
    return torch.stack(rows)


def _redrawn(model: FlatModel) -> nn.Module:
    """The network after the `reset_parameters` of every layer."""
    module, drawn = model.export(model.theta, model.buffers, model.counters), set[str]()
    for name, layer in module.named_modules():
        if callable(getattr(layer, "reset_parameters", None)):
            layer.reset_parameters()
            drawn |= {f"{name}.{own}".removeprefix(".") for own, _ in layer.named_parameters(recurse=False)}
    for span in model.spans:
        if span.name not in drawn:
            raise InputError(f"ifca: no layer draws {span.name!r} anew: give its module a reset_parameters()")
    return module
