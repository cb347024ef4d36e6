"""The hypernetwork that makes every client's weights, as a flat vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedflat.core.flat import FlatModel, Span

Shape = tuple[int, int, int, int]
"""Of a hypernetwork: length of the embeddings, width, hidden layers after the first, size of the pieces."""


class HyperNetwork(nn.Module):
    """Makes a client's weights from its embedding, with one output layer per tensor, or one for all, in pieces.

    Args:
        clients: The number of embeddings.
        sizes: The numbers of elements of the tensors to make.
        embedding: The length of an embedding.
        hidden: The width of the trunk.
        layers: The number of hidden layers after the first one.
        chunk: The size of the pieces; 0 for one output layer per tensor.
    """

    def __init__(
        self, clients: int, sizes: Iterable[int], embedding: int, hidden: int, layers: int, chunk: int
    ) -> None:
        super().__init__()
        sizes = list(sizes)
        self.size, self.chunk = sum(sizes), chunk
        self.embedding = nn.Embedding(clients, embedding)
        pieces = -(-self.size // chunk) if chunk else 0
        self.pieces = nn.Embedding(pieces, embedding) if chunk else None
        inputs = 2 * embedding if chunk else embedding
        trunk: list[nn.Module] = [nn.Linear(inputs, hidden)]
        for _ in range(layers):
            trunk += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.trunk = nn.Sequential(*trunk)
        self.outputs = nn.ModuleList(nn.Linear(hidden, size) for size in ([chunk] if chunk else sizes))

    def forward(self, client: int | None) -> Tensor:
        """The weights of a client as one vector; None stands for the mean embedding."""
        rows = self.embedding.weight
        own = rows.mean(dim=0) if client is None else rows[client]
        if self.pieces is None:
            features = self.trunk(own)
            return torch.cat([layer(features) for layer in self.outputs])
        several = self.pieces.weight
        features = self.trunk(torch.cat([own.expand(len(several), -1), several], dim=1))
        out: Tensor = self.outputs[0](features).reshape(-1)[: self.size]
        return out


@dataclass(frozen=True)
class Generator:
    """A hypernetwork as a flat vector φ, and the places of its output in the target's weights."""

    network: FlatModel
    spans: tuple[Span, ...]

    def weights(self, phi: Tensor, client: int | None, base: Tensor) -> Tensor:
        """A client's weights under φ; those that are not generated are taken from `base`."""
        self.network.theta.copy_(phi)
        with torch.no_grad():
            made = self.network.module(self._known(client))
        return self._placed(made, base.clone())

    def add_gradient(self, client: int, delta: Tensor, scale: float) -> None:
        """Add a client's gradient −scale · Jᵀ Δ to the network's gradient."""
        made = self.network.module(self._known(client))
        pieces = [delta[span.start : span.stop] for span in self.spans]
        made.backward(torch.cat(pieces).mul_(-scale).to(made.dtype))

    def _placed(self, made: Tensor, into: Tensor) -> Tensor:
        position = 0
        for span in self.spans:
            size = span.stop - span.start
            into[span.start : span.stop] = made[position : position + size]
            position += size
        return into

    def _known(self, client: int | None) -> int | None:
        """None, the mean embedding, for a new client, which has no embedding."""
        rows = self.network.module.get_submodule("embedding").weight
        assert isinstance(rows, Tensor)
        return client if client is not None and client < len(rows) else None

    def rows(self, clients: Iterable[int]) -> Tensor:
        """A mask over φ: 0 on the embeddings of all clients but these."""
        span = next(span for span in self.network.spans if span.name == "embedding.weight")
        mask = torch.ones_like(self.network.theta)
        mask[span.start : span.stop] = 0
        for client in clients:
            span.of(mask)[client] = 1
        return mask


def make_generator(spans: tuple[Span, ...], clients: int, shape: Shape, dtype: torch.dtype) -> Generator:
    """A generator of these tensors for `clients` clients, initialised from PyTorch's global generator."""
    network = HyperNetwork(clients, [span.stop - span.start for span in spans], *shape)
    return Generator(FlatModel(network, dtype), spans)
