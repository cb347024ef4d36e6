"""Some clients trained for one round more, from where a run stands: how far apart does that take them?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedflat import streams
from fedflat.analysis.connectivity import Connectivity, connectivity
from fedflat.analysis.cross_client import CrossClient, cross_client
from fedflat.analysis.options import Options
from fedflat.analysis.results import plain
from fedflat.analysis.signal import gsnr
from fedflat.client import train
from fedflat.data import Federation
from fedflat.errors import InputError
from fedflat.result import Run
from fedflat.runner import single_thread
from fedflat.server import learning_rate
from fedflat.task import Job

PROBES = 20  # of the Hessian's diagonal


@dataclass(frozen=True, eq=False)
class Clients:
    """What one local round does to some clients' models.

    clients: who. first, last: Σr of the gradient signal at the first and the last local step (paper 004, fig. 14).
    curvature: H_N and H_D of the trained models (paper 001). lines: barriers on the straight lines between them.
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
        """A matplotlib figure: gradient signal and barriers."""
        from fedflat.analysis.plots import clients_figure

        return clients_figure(self)


def local_models(run: Run, federation: Federation, clients: Sequence[int]) -> list[nn.Module]:
    """The clients' models after one local round from the run's present weights; the run is left as it is."""
    task, server = copy.copy(run._task), copy.copy(run._server)
    task.federation = federation
    server.round += 1
    server.lr = learning_rate(task, server)
    received = {part.name: part.broadcast(server) for part in task.method.filling("broadcast")}
    models = []
    with single_thread(), streams.isolated(run.experiment.seed, "run"):
        for client in clients:
            theta = task.method.owner("generate").generate(server, client)
            states = run.client_state(client)
            job = Job(server.round, client, server.lr, 1.0, theta, server.buffers, server.counters, received, states)
            update = train(task, job)
            if update.failure is not None:
                raise InputError(
                    f"client {client} diverges in a further round ({update.failure}): choose other clients"
                )
            models.append(task.model.export(task.model.theta, task.model.buffers, task.model.counters))
    return models


def client_table(
    run: Run,
    federation: Federation,
    clients: Sequence[int],
    data: Sequence[tuple[Tensor, Tensor]],
    **options: Unpack[Options],
) -> Clients:
    """Train the clients for one round from the run's weights and compare their models. data: of each, to look at."""
    models = local_models(run, federation, clients)
    union = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    return Clients(
        list(clients),
        [gsnr(run.model, own, **options).total for own in data],
        [gsnr(model, own, **options).total for model, own in zip(models, data, strict=True)],
        cross_client(models, data, probes=PROBES, **options),
        connectivity(models, union, **options),
    )
