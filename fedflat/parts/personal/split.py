"""Part of the network stays with the client: FedRep, FedPer, LG-FedAvg, FedBABU, and training alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fedflat.errors import InputError
from fedflat.flat import FlatModel, names_within
from fedflat.groups import layer_groups
from fedflat.method import Fit, Local, Part

if TYPE_CHECKING:
    from fedflat.task import Task


def tensors_of(model: FlatModel, modules: Iterable[str]) -> list[str]:
    """Names of all parameters and buffers of some submodules."""
    spans = (*model.spans, *model.buffer_spans, *model.counter_spans)
    return [name for module in modules for name in names_within(spans, module)]


def head_tensors(model: FlatModel, who: str) -> list[str]:
    """Names of the head's parameters and buffers, or an error that tells the user of `who` to name another head."""
    head = model.require_head(who)
    if not names_within(model.spans, head):
        raise InputError(f"{who} parts the network at its head, but {head!r} has no weights; name it with head='…'")
    return tensors_of(model, [head])


def head_mask(local: Local, part: Part) -> Tensor:
    """1 on the weights of the head, 0 on those of the body."""
    scratch = local.scratch(part)
    if "head" not in scratch:
        scratch["head"] = local.model.mask(local.model.require_head(part.name))
    mask: Tensor = scratch["head"]
    return mask


@dataclass(frozen=True)
class FedRep(Part):
    """Every client has its own head on a common body (Collins et al., 2021).

    head_epochs: E_h. The head is the last linear layer, or the one that `head` names. Client keeps its head; sends the
    body down, the body up. Each phase has a momentum of its own, so that the frozen part is still bit for bit.
    A new client is adapted by E_h epochs on its head.
    """

    formula: ClassVar[str] = (
        "E_h epochs h_i ← h_i − η_l ∇F_B(h_i),  then E epochs φ ← φ − η_l ∇F_B(φ)\n"
        "server: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i"
    )
    splits: ClassVar[bool] = True
    head_epochs: int = 10

    def __post_init__(self) -> None:
        self.require(self.head_epochs >= 0, f"head_epochs must not be negative, got {self.head_epochs}")

    def private(self, model: FlatModel) -> Iterable[str]:
        """The head."""
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        """Head, then body."""
        head = head_mask(local, self)
        fit(epochs=self.head_epochs, only=head, branch="head")
        fit(only=1 - head)

    def adapt(self, local: Local, fit: Fit) -> None:
        """The head alone."""
        fit(epochs=self.head_epochs, only=head_mask(local, self), branch="adapt")


@dataclass(frozen=True)
class FedPer(Part):
    """The last layers stay with the client, all are trained together (Arivazhagan et al., 2019).

    layers: how many of the last weight layers, each with its normalisation; 0 is FedAvg.
    Client keeps these layers; sends the others down, the others up.
    """

    formula: ClassVar[str] = (
        "(φ, h_i) ← (φ, h_i) − η_l ∇F_B(φ, h_i),  h_i the last layers\nserver: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i"
    )
    splits: ClassVar[bool] = True
    layers: int = 1

    def __post_init__(self) -> None:
        self.require(self.layers >= 0, f"layers must not be negative, got {self.layers}")

    def private(self, model: FlatModel) -> Iterable[str]:
        """The last layers."""
        groups = layer_groups(model)
        self.require(self.layers <= len(groups), f"layers={self.layers}, but the model has {len(groups)} weight layers")
        last = groups[len(groups) - self.layers :]
        return tensors_of(model, [owner for group in last for owner in group.owners])


@dataclass(frozen=True)
class LGFedAvg(Part):
    """Every client has its own features under a common head (Liang et al., 2020).

    All layers are trained together; the head is averaged. Client keeps the body; sends the head down, the head up.
    Differs from the authors' command for CIFAR, which shares the first layers instead; this is their paper.
    """

    name: ClassVar[str] = "lg_fedavg"
    formula: ClassVar[str] = (
        "(φ_i, h) ← (φ_i, h) − η_l ∇F_B(φ_i, h),  h the head\nserver: h ← h + η_g Σ_S n_i Δh_i / Σ_S n_i"
    )
    splits: ClassVar[bool] = True

    def private(self, model: FlatModel) -> Iterable[str]:
        """All but the head."""
        shared = set(head_tensors(model, self.name))
        return [name for name in tensors_of(model, [""]) if name not in shared]


@dataclass(frozen=True)
class FedBABU(Part):
    """Train and average the body under a head that stays as it was made; fit both at evaluation (Oh et al., 2022).

    epochs: τ, local epochs of that fit. tune: what it trains, "full", "head" or "body".
    Client keeps nothing but the common head; sends the body down, the body up.
    """

    formula: ClassVar[str] = (
        "φ ← φ − η_l ∇F_B(φ, h₀),  h₀ the initial head;  server: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i\n"
        "at evaluation τ epochs (φ, h) ← (φ, h) − η_l ∇F_B(φ, h) from (φ, h₀)"
    )
    adapts: ClassVar[bool] = True
    epochs: int = 1
    tune: str = "full"

    def __post_init__(self) -> None:
        self.require(self.epochs >= 0, f"epochs must not be negative, got {self.epochs}")
        self.require(self.tune in ("full", "head", "body"), f"tune is 'full', 'head' or 'body', not {self.tune!r}")

    def private(self, model: FlatModel) -> Iterable[str]:
        """The head, which all have alike."""
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        """The body alone."""
        fit(only=1 - head_mask(local, self))

    def adapt(self, local: Local, fit: Fit) -> None:
        """τ epochs on what `tune` says."""
        head = head_mask(local, self)
        fit(epochs=self.epochs, only={"full": None, "head": head, "body": 1 - head}[self.tune], branch="adapt")


@dataclass(frozen=True)
class LocalOnly(Part):
    """Every client trains alone: what federation has to beat.

    Client keeps its whole model; nothing is sent.
    """

    name: ClassVar[str] = "local_only"
    formula: ClassVar[str] = "θ_i ← θ_i − η_l ∇F_B(θ_i),  nothing is averaged"
    splits: ClassVar[bool] = True

    def private(self, model: FlatModel) -> Iterable[str]:
        """Everything."""
        return tensors_of(model, [""])


@dataclass(frozen=True)
class FineTune(Part):
    """Fit the common model to a client before it is evaluated there; training is as without.

    epochs: τ, local epochs of that fit. Keeps nothing; sends 1 down, 1 up.
    """

    formula: ClassVar[str] = "at evaluation τ epochs θ ← θ − η_l ∇F_B(θ) from θ = w"
    adapts: ClassVar[bool] = True
    epochs: int = 1

    def __post_init__(self) -> None:
        self.require(self.epochs >= 0, f"epochs must not be negative, got {self.epochs}")

    def check(self, task: Task) -> None:
        """Say so where nobody would see the difference."""
        own = task.federation.has_client_tests and task.experiment.evaluate_clients is not None
        self.require(own, "it acts when clients are evaluated: give them test data, and leave evaluate_clients on")

    def adapt(self, local: Local, fit: Fit) -> None:
        """τ epochs on everything."""
        fit(epochs=self.epochs, branch="adapt")
