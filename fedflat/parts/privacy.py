"""Client-level differential privacy: DP-FedAvg (McMahan et al., 2018)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.core.batchnorm import batchnorms
from fedflat.core.fields import NonNegative, Positive, Range
from fedflat.core.part import Part
from fedflat.core.participation import sampling
from fedflat.core.rows import bounded
from fedflat.core.views import Local, Server, SetupView, Update
from fedflat.parts import accountant as accounts
from fedflat.parts.requirements import LENGTH

log = logging.getLogger(__name__)
EDGE = 1e-5  # a norm that close to C was clipped to it


@dataclass(frozen=True)
class DP(Part):
    """Clip every update and add Gaussian noise to their sum, so that no client can be recognised in the model.

    The metrics of round t contain `epsilon`, the ε of all models up to round t together. It compares with a run in
    which one client's updates are zeros; to compare with another client in its place, take the ε of z/2.
    Clients clip, and the server clips again, so that nobody moves the model further than C/m, whatever is sent. The
    server adds the noise and must be trusted. Sampling lowers ε as far as it is proved: bernoulli(q) counts as Poisson
    sampling redrawn when nobody joins, uniform(m) as sampling without replacement; `all` and your own participants
    count as no sampling (see `fedflat.parts.accountant`).
    Only the models are covered: losses, norms and counts in the records are not, and whoever knows `seed` knows the
    noise. BatchNorm statistics that are averaged, and parts that send more than the update, are refused.
    Keeps nothing; sends 1 down, 1 up. Differs from the paper in its accountant, and in weights of 1 for every client.

    Args:
        clip: C, the largest norm of an update; None does not clip.
        noise: z, the standard deviation of the noise in units of C; 0 adds no noise and guarantees nothing.
        delta: δ.
        quantile: γ: move C after every round towards this quantile of the clients' norms (Andrew et al., 2021), from
            `clip` at first. The count of norms below C has noise of its own, and the update's is raised so that z is
            that of both together. None keeps C.
        clip_lr: η_C, how fast C moves.
        count_noise: σ_b, the noise of that count; None is m/20.
        accountant: "rdp" is our own; "prv" is tighter and takes opacus (`pip install 'fedflat[dp]'`), where it is
            installed and where it knows the sampling; the log says which one was taken.
    """

    formula: ClassVar[str] = (
        "Δ_i ← Δ_i min(1, C/‖Δ_i‖),  Δ̄ = (Σ_S Δ_i + N(0, z²C² I)) / m\n"
        "m = qN under bernoulli(q), else the number of clients asked\n"
        "with γ:  C ← C exp(−η_C (b − γ)),  b the share of ‖Δ_i‖ ≤ C, with noise"
    )
    stacks: ClassVar[bool] = True
    needs_mean: ClassVar[bool] = True
    uniform: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = (LENGTH,)
    rank: ClassVar[int] = 50  # clips the update after other parts have changed it
    clip: Positive | None = 1.0
    noise: NonNegative = 1.0
    delta: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 1e-5
    quantile: Annotated[float, Range(0, 1, open_low=True, open_high=True)] | None = None
    clip_lr: Positive = 0.2
    count_noise: Positive | None = None
    accountant: Literal["rdp", "prv"] = "rdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.clip is not None or self.noise == 0, "noise needs a clip: its size is a multiple of it")

    @property
    def hides_participation(self) -> bool:
        return self.noise > 0

    def check(self, setup: SetupView) -> None:
        message = "its bound and its noise are those of plain means: leave weighting at 'auto' or 'uniform'"
        self.require(setup.uniform or self.clip is None, message)
        if self.noise == 0:
            return
        law = sampling(setup.experiment.participation)[0] if setup.sampled else ""
        self.require(law != "power_of_choice", "the losses by which power_of_choice draws clients have no noise")
        for name, _ in batchnorms(setup.model.module):
            shared = f"{name}.running_mean".removeprefix(".") not in setup.private.names
            self.require(not shared, f"the statistics of {name} are averaged without noise: use batchnorm='local'")
        if self.accountant == "prv":
            law = sampling(setup.experiment.participation)[0] if setup.sampled else "unknown"
            why = "" if find_spec("opacus") else " (opacus is not installed: pip install 'fedflat[dp]')"
            why = " (it does not know samples of a fixed size)" if law == "uniform" else why
            log.info("dp: epsilon is by %s", f"our own accountant{why}" if why else "the PRV accountant of opacus")
        if not setup.sampled:
            log.warning("dp: it is not known how participants= draws clients, so epsilon counts no sampling")
        if setup.evaluator is not None and setup.evaluator.simulation_only:
            log.warning(
                "dp: epsilon does not cover the weights that %s evaluates, which have no noise", setup.evaluator
            )

    def limit(self, server: Server) -> float | None:
        """C of this round."""
        kept = server.states.get(self.name, {}).get("clip")
        return self.clip if kept is None else float(kept)

    def broadcast(self, server: Server) -> Mapping[str, Tensor]:
        if self.quantile is None or self.clip is None:
            return {}
        return {"clip": torch.tensor([self.limit(server)], dtype=torch.float64)}

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        others = sorted(local.messages)
        message = f"{', '.join(others)} sends tensors that are neither clipped nor noised: leave it out, or set noise=0"
        self.require(self.noise == 0 or not others, message)
        told = local.received(self).get("clip")
        return bounded(delta, self.clip if told is None else told.to(delta))

    def combine(self, server: Server, updates: Iterable[Update]) -> Tensor:
        law, value = _law(server)
        number = value * server.clients if law == "bernoulli" else server.asked  # must not depend on who joined
        limit, norms = self.limit(server), list[float]()
        mean = super().combine(server, _clipped(updates, limit, norms)).mul_(len(norms) / number)
        if limit is None:
            return mean
        stream = streams.stream(server.experiment.seed, streams.of_part(self.name), server.round)
        if self.noise:
            draw = stream.normal(mean.shape, torch.float64)
            mean = mean.add_(draw.to(mean.dtype), alpha=self._update_noise(number) * limit / number)
        if self.quantile is not None:
            below = sum((norm < limit * (1 - EDGE)) - 0.5 for norm in norms)
            count = below + (self._count_noise(number) * float(stream.normal(1, torch.float64)) if self.noise else 0.0)
            share = 0.5 + count / number
            moved = limit * math.exp(-self.clip_lr * (share - self.quantile))
            server.state(self)["clip"] = torch.tensor([moved], dtype=torch.float64)
        return mean

    def _count_noise(self, number: float) -> float:
        return number / 20 if self.count_noise is None else self.count_noise

    def _update_noise(self, number: float) -> float:
        """z of the updates alone, so that with that of the count it is `noise`: z⁻² = z_Δ⁻² + (2σ_b)⁻²."""
        if self.quantile is None:
            return self.noise
        twice = 2 * self._count_noise(number)
        message = f"noise={self.noise} needs a count_noise above {self.noise / 2:g}, and has {twice / 2:g}: raise it"
        self.require(self.noise < twice, message)
        return float((self.noise**-2 - twice**-2) ** -0.5)

    def round_metrics(self, setup: SetupView, server: Server, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
        limit = None if self.quantile is None else self.limit(server)
        told = {} if limit is None else {"clip": limit}
        return told | ({"epsilon": self.epsilon(server)} if self.noise else {})

    def epsilon(self, server: Server) -> float:
        """The ε of all rounds so far, by the accountant that is asked for where it is there and knows the sampling."""
        own = accounts.epsilon(server.round * self.divergence(server), self.delta)
        law, value = _law(server)
        if self.accountant == "rdp" or law == "uniform":
            return own
        rate = value if law == "bernoulli" else 1.0
        alone = server.round * accounts.alone(rate, server.clients) * (1 + math.exp(min(own, 700.0)))
        if not find_spec("opacus") or alone > self.delta / 2:
            return own
        return min(own, accounts.prv_epsilon(self.noise, rate, server.round, self.delta - alone))

    def divergence(self, server: Server) -> accounts.Array:
        """The Rényi divergence of one round, given what is known about the sampling."""
        law, value = _law(server)
        if law == "bernoulli":
            return accounts.bernoulli(self.noise, value, server.clients)
        if law == "uniform":
            return accounts.fixed_size(self.noise, value / server.clients)
        return accounts.gaussian(self.noise)


def _law(server: Server) -> tuple[str, float]:
    return sampling(server.experiment.participation) if server.sampled else ("unknown", 1)


def _clipped(updates: Iterable[Update], limit: float | None, norms: list[float]) -> Iterator[Update]:
    """The updates, clipped once more: a client need not have done it. norms: where their lengths are noted."""
    for update in updates:
        if update.client >= 0:
            norms.append(update.norm)
        yield replace(update, delta=bounded(update.delta, limit))
