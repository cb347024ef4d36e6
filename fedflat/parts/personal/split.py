"""Part of the network stays with the client: FedRep, FedPer, LG-FedAvg, FedBABU, and training without a federation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedflat.core.fields import Natural
from fedflat.core.flat import FlatModel, names_within
from fedflat.core.groups import layer_groups
from fedflat.core.part import Fit, Part
from fedflat.core.views import Local, SetupView
from fedflat.errors import InputError


def tensors_of(model: FlatModel, modules: Iterable[str]) -> list[str]:
    """Names of all parameters and buffers of some submodules."""
    spans = (*model.spans, *model.buffer_spans, *model.counter_spans)
    return [name for module in modules for name in names_within(spans, module)]


def head_tensors(model: FlatModel, who: str) -> list[str]:
    """Names of the head's parameters and buffers; raises an error that names part `who` if it has no weights."""
    head = model.require_head(who)
    if not names_within(model.spans, head):
        raise InputError(f"{who} splits the network at its head, but {head!r} has no weights; name it with head='…'")
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

    The head is the last linear layer, or the one that `head` names. The client keeps its head; sends the body down, the
    body up. Each phase has its own momentum, so that the frozen part does not change at all. A new client is adapted by
    E_h epochs on its head. `plgu_grep` has the same two fields.

    Args:
        head_epochs: E_h, the epochs on the head per round; None is `local_epochs`.
        body_epochs: E_b, the epochs on the body per round; None is `local_epochs`.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "E_h epochs h_i ← h_i − η_l ∇F_B(h_i),  then E_b epochs φ ← φ − η_l ∇F_B(φ)\n"
        "server: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i"
    )
    stacks: ClassVar[bool] = True
    common_model: ClassVar[bool] = False
    head_epochs: Natural | None = 10
    body_epochs: Natural | None = None

    def private(self, model: FlatModel) -> Iterable[str]:
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        head = head_mask(local, self)
        fit(epochs=self.head_epochs, only=head, branch="head")
        fit(epochs=self.body_epochs, only=1 - head)

    def adapt(self, local: Local, fit: Fit) -> None:
        fit(epochs=self.head_epochs, only=head_mask(local, self), branch="adapt")


@dataclass(frozen=True)
class FedPer(Part):
    """The last layers stay with the client, all are trained together (Arivazhagan et al., 2019).

    The client keeps these layers; sends the others down, the others up.

    Args:
        layers: How many of the last weight layers stay, each with its normalisation; 0 is FedAvg.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "(φ, h_i) ← (φ, h_i) − η_l ∇F_B(φ, h_i),  h_i the last layers\nserver: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i"
    )
    common_model: ClassVar[bool] = False
    layers: Natural = 1

    def private(self, model: FlatModel) -> Iterable[str]:
        groups = layer_groups(model)
        self.require(self.layers <= len(groups), f"layers={self.layers}, but the model has {len(groups)} weight layers")
        last = groups[len(groups) - self.layers :]
        return tensors_of(model, [owner for group in last for owner in group.owners])


@dataclass(frozen=True)
class LGFedAvg(Part):
    """Every client has its own features under a common head (Liang et al., 2020).

    All layers are trained together; the head is averaged. The client keeps the body; sends the head down, the head up.
    Differs from the authors' command for CIFAR, which shares the first layers instead; this follows the paper.
    """

    name: ClassVar[str] = "lg_fedavg"
    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "(φ_i, h) ← (φ_i, h) − η_l ∇F_B(φ_i, h),  h the head\nserver: h ← h + η_g Σ_S n_i Δh_i / Σ_S n_i"
    )
    common_model: ClassVar[bool] = False

    def private(self, model: FlatModel) -> Iterable[str]:
        shared = set(head_tensors(model, self.name))
        return [name for name in tensors_of(model, [""]) if name not in shared]


@dataclass(frozen=True)
class FedBABU(Part):
    """Train and average the body under the fixed initial head; fine-tune for evaluation (Oh et al., 2022).

    The client keeps only the head, the same for all; sends the body down, the body up.

    Args:
        epochs: τ, the epochs of the fine-tuning.
        tune: What the fine-tuning trains: "full", "head" or "body".
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = (
        "φ ← φ − η_l ∇F_B(φ, h₀),  h₀ the initial head;  server: φ ← φ + η_g Σ_S n_i Δφ_i / Σ_S n_i\n"
        "at evaluation τ epochs (φ, h) ← (φ, h) − η_l ∇F_B(φ, h) from (φ, h₀)"
    )
    stacks: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    epochs: Natural = 1
    tune: Literal["full", "head", "body"] = "full"

    def private(self, model: FlatModel) -> Iterable[str]:
        return head_tensors(model, self.name)

    def train(self, local: Local, fit: Fit) -> None:
        fit(only=1 - head_mask(local, self))

    def adapt(self, local: Local, fit: Fit) -> None:
        head = head_mask(local, self)
        fit(epochs=self.epochs, only={"full": None, "head": head, "body": 1 - head}[self.tune], branch="adapt")


@dataclass(frozen=True)
class LocalOnly(Part):
    """Every client trains alone: the baseline that federated learning has to beat.

    The client keeps its whole model; nothing is sent.
    """

    name: ClassVar[str] = "local_only"
    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = "θ_i ← θ_i − η_l ∇F_B(θ_i),  nothing is averaged"
    common_model: ClassVar[bool] = False

    def private(self, model: FlatModel) -> Iterable[str]:
        return tensors_of(model, [""])


@dataclass(frozen=True)
class FineTune(Part):
    """Fine-tune the common model on each client before it is evaluated there; training does not change.

    Keeps nothing; sends 1 down, 1 up.

    Args:
        epochs: τ, the epochs of the fine-tuning.
    """

    judged_by: ClassVar[str] = "clients"
    formula: ClassVar[str] = "at evaluation τ epochs θ ← θ − η_l ∇F_B(θ) from θ = w"
    adapts: ClassVar[bool] = True
    epochs: Natural = 1

    def check(self, setup: SetupView) -> None:
        own = setup.federation.has_client_tests and setup.experiment.evaluate_clients is not None
        self.require(
            own, "it acts when clients are evaluated: give them test data, and do not turn evaluate_clients off"
        )

    def adapt(self, local: Local, fit: Fit) -> None:
        fit(epochs=self.epochs, branch="adapt")
