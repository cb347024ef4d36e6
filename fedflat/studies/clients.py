"""Train some clients for one more round from a run's weights: how far do their models move apart?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat.analysis.connectivity import Connectivity, connectivity
from fedflat.analysis.cross_client import CrossClient, cross_client
from fedflat.analysis.drawing import BLUE, RED, draw_matrix, dress
from fedflat.analysis.problem import Options
from fedflat.analysis.results import plain
from fedflat.analysis.signal import gsnr
from fedflat.core import streams
from fedflat.core.devices import CPU
from fedflat.core.inputs import concatenated
from fedflat.core.processes import single_thread
from fedflat.data import Federation
from fedflat.engine.jobs import train
from fedflat.engine.placement import placed
from fedflat.engine.round_loop import learning_rate
from fedflat.engine.setup import Broadcast, Job
from fedflat.errors import InputError
from fedflat.extras import blank_figure
from fedflat.runs.result import Run

PROBES = 20  # random probes per Hessian diagonal


@dataclass(frozen=True, eq=False)
class Clients:
    """What one local round does to some clients' models.

    Attributes:
        clients: Numbers of the clients.
        first, last: Σr of the gradient signal at the first and at the last local step (FedCONST paper, fig. 14).
        curvature: H_N and H_D of the trained models (FedAlign).
        lines: Barriers on the straight lines between the trained models.
    """

    clients: list[int]
    first: list[float]
    last: list[float]
    curvature: CrossClient
    lines: Connectivity

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and lists only."""
        return plain(self)

    def plot(self) -> Any:
        """Gradient signal at the first and the last local step, and the barriers between the models."""
        figure = blank_figure(10, 4.2)
        left, right = figure.subplots(1, 2)
        names = [str(client) for client in self.clients]
        for values, colour, label in ((self.first, BLUE, "first step"), (self.last, RED, "last step")):
            left.plot(names, values, "o", color=colour, label=label)
        left.legend(frameon=False)
        dress(left, "gradient signal Σr", "client", "")
        draw_matrix(figure, right, self.lines.barrier, "barrier between two clients", self.clients)
        return figure


def local_models(
    run: Run, federation: Federation, clients: Sequence[int], device: torch.device = CPU
) -> list[nn.Module]:
    """The clients' models after one local round, on a device, from the run's weights; the run does not change."""
    server = copy.copy(run._state.server)
    setup = placed(replace(run._state.setup, federation=federation), device)
    server.round += 1
    server.lr = learning_rate(setup, server)
    received = {part.name: part.broadcast(server) for part in setup.method.filling("broadcast")}
    broadcast = Broadcast(server.round, server.lr, server.theta, server.buffers, server.counters, received).on(device)
    models = []
    with single_thread(), streams.isolated(run.experiment.seed, "run"):
        for client in clients:
            theta = setup.method.owner("generate").generate(server, client)
            job = Job(client, weight=1.0, states=run.client_state(client), theta=theta)
            update = train(setup, broadcast, job.on(device))
            if update.failure is not None:
                raise InputError(f"client {client} diverges in one more round ({update.failure}): choose other clients")
            own = setup.model.export(setup.model.theta, setup.model.buffers, setup.model.counters)
            models.append(own.to(device))
    return models


def client_table(
    run: Run,
    federation: Federation,
    clients: Sequence[int],
    data: Sequence[tuple[Tensor, Tensor]],
    device: torch.device = CPU,
    **options: Unpack[Options],
) -> Clients:
    """Train the clients for one round from the run's weights and compare their models.

    Args:
        data: The samples to analyse, one pair (x, y) per client.
        device: Where the clients train and their models are analysed.
    """
    models, common = local_models(run, federation, clients, device), copy.deepcopy(run.model).to(device)
    union = concatenated([x for x, _ in data]), torch.cat([y for _, y in data])
    return Clients(
        list(clients),
        [gsnr(common, own, **options).total for own in data],
        [gsnr(model, own, **options).total for model, own in zip(models, data, strict=True)],
        cross_client(models, data, probes=PROBES, **options),
        connectivity(models, union, **options),
    )
