"""Malicious clients, for testing defences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedflat.core.devices import on
from fedflat.core.fields import Natural
from fedflat.core.flat import FlatModel
from fedflat.core.part import Part
from fedflat.core.samples import Samples
from fedflat.core.views import Batch, Local, Server, SetupView, Update
from fedflat.errors import InputError
from fedflat.parts.collusion import AGREED, agreed

TOGETHER = (*AGREED, "collude", "size")  # kinds that are made where all updates of a round are known
PIECE = 500  # samples per forward pass


@dataclass(frozen=True)
class Attack(Part):
    """Let some clients send other updates than the method asks for.

    Acts after all other parts: an attacker does not clip. Kinds that need the updates of others are made on the server,
    before anything else looks at the updates. Keeps nothing; sends 1 down, 1 up.

    Args:
        kind: "sign_flip" sends the reversed update, "noise" Gaussian noise instead of it, "label_flip" an update
            trained on reversed labels: the last class in place of the first, the last but one in place of the second, …
            "alie", "ipm", "min_max" and "min_sum" know all honest updates of the round and all send the same,
            "collude" knows those of the attackers only and sends their mean, reversed. "backdoor" teaches class 0 for
            inputs with a bright corner, and records `backdoor`, the fraction of such test inputs that are taken for
            class 0. "messages" reverses what other parts send beside the update. "size" reverses the update, and
            claims s times as many samples.
        clients: f, the number of malicious clients: client i of N is malicious if i·f mod N < f. 0 is no attack.
        scale: s, the factor of what is sent; z of "alie", ε of "ipm".
    """

    formula: ClassVar[str] = (
        "malicious clients send −s Δ_i,  s N(0, I),  s Δ_i of labels C − 1 − y  or of marked inputs,\n"
        "μ − s σ,  −s μ,  μ − s γ σ  with the largest γ that goes unnoticed;  μ, σ of the honest updates"
    )
    stacks: ClassVar[bool] = True
    rank: ClassVar[int] = 90
    kind: Literal[
        "sign_flip",
        "noise",
        "label_flip",
        "alie",
        "ipm",
        "min_max",
        "min_sum",
        "collude",
        "backdoor",
        "messages",
        "size",
    ] = "sign_flip"
    clients: Natural = 1
    scale: float = 1.0

    @property
    def fewest_clients(self) -> int:
        """As many as attack."""
        return max(1, self.clients)

    def check(self, setup: SetupView) -> None:
        self.require(
            self.clients <= setup.clients, f"clients={self.clients} is more than the {setup.clients} clients that train"
        )
        if self.kind in ("label_flip", "backdoor"):
            self._classes(setup.model)
            x, labels = setup.federation.samples(0).batch(torch.zeros(1, dtype=torch.int64))
            message = f"{self.kind} needs classes, but the targets are numbers: choose another kind"
            self.require(not labels.is_floating_point(), message)
            self.require(self.kind == "label_flip" or isinstance(x, Tensor), "backdoor needs inputs of one tensor")

    def _classes(self, model: FlatModel) -> int:
        head = model.submodule(model.require_head(self.name))
        if not isinstance(head, nn.Linear):
            raise InputError(
                f"{self.name}: {self.kind} counts classes by the outputs of a Linear head; name one with head='…'"
            )
        return head.out_features

    def malicious(self, client: int, clients: int) -> bool:
        """Whether this client is malicious; clients that never train are not."""
        return client < clients and client * self.clients % clients < self.clients

    def batch(self, local: Local, batch: Batch) -> Batch:
        if not self.malicious(local.client, local.clients):
            return batch
        if self.kind == "label_flip":
            last = self._classes(local.model) - 1
            return Batch(batch.x, tuple((weight, torch.where(y < 0, y, last - y)) for weight, y in batch.targets))
        if self.kind == "backdoor":
            half = (len(batch.x) + 1) // 2
            x = torch.cat([marked(batch.x[:half]), batch.x[half:]])
            return Batch(x, tuple((w, torch.cat([torch.zeros_like(y[:half]), y[half:]])) for w, y in batch.targets))
        return batch

    def sent(self, local: Local, delta: Tensor) -> Tensor:
        """What one client sends, if it needs no knowledge of others."""
        if not self.malicious(local.client, local.clients) or self.kind in (*TOGETHER, "messages"):
            return delta
        if self.kind == "noise":
            draw = torch.from_numpy(local.numpy_stream(self.name).standard_normal(delta.numel())).to(delta.dtype)
            delta = on(draw, delta.device)
        return delta * (-self.scale if self.kind == "sign_flip" else self.scale)

    def upload(self, local: Local, delta: Tensor) -> Tensor:
        members = local.members
        if self.kind == "messages":
            bad = [self.malicious(member.client, member.clients) for member in members]
            factors = torch.tensor([-self.scale if one else 1.0 for one in bad])
            for state in local.messages.values():
                state.update({name: _times(tensor, factors) for name, tensor in state.items()})
        rows = zip(members, delta.reshape(len(members), -1), strict=True)
        return torch.stack([self.sent(member, row) for member, row in rows]).view_as(delta)

    def regroup(self, server: Server, updates: Iterable[Update]) -> Iterable[Update]:
        if self.kind not in TOGETHER:
            return updates
        received = list(updates)
        bad = [u for u in received if self.malicious(u.client, server.clients)]
        if not bad:
            return received
        honest = [u.delta for u in received if not self.malicious(u.client, server.clients)]
        if self.kind == "size":
            claim = 1.0 if server.uniform else self.scale  # where sizes are no weights, a claim has no effect
            made = {u.client: replace(u, delta=-u.delta, weight=claim * u.weight) for u in bad}
        else:
            common = agreed(self.kind, honest, [u.delta for u in bad], self.scale)
            made = {u.client: replace(u, delta=common.clone()) for u in bad}
        return [made.get(u.client, u) for u in received]

    def test_metrics(self, setup: SetupView, test: Samples) -> Mapping[str, float]:
        if self.kind != "backdoor":
            return {}
        taken = judged = 0
        for positions in torch.split(torch.arange(len(test)), PIECE):
            x, y = test.batch(positions)
            output: Any = setup.model(marked(setup.federation.preprocess(x, None, setup.model.theta.dtype)))
            others = y > 0
            taken, judged = taken + int((output.argmax(1) == 0)[others].sum()), judged + int(others.sum())
        return {"backdoor": taken / max(1, judged)}


def _times(tensor: Tensor, factors: Tensor) -> Tensor:
    """Every client's row times its factor; whole numbers stay."""
    if not tensor.is_floating_point():
        return tensor
    rows = tensor.reshape(len(factors), -1) * factors.to(tensor)[:, None]
    return rows.reshape(tensor.shape)


def marked(x: Tensor) -> Tensor:
    """Inputs with a bright corner: the last two pixels of the last two rows, or the last three features."""
    x = x.clone()
    corner = x[..., -2:, -2:] if x.dim() > 2 else x[..., -3:]
    corner.fill_(float(x.max()) if len(x) else 1.0)
    return x
