"""Networks for sequences of symbols."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat.errors import InputError
from fedflat.models.checks import whole


def _length(model: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise InputError(f"model {model!r} takes sequences of symbols, inputs of shape (length,), not {tuple(shape)}")
    return shape[0]


class CharLSTM(nn.Module):
    """Embedding, LSTM, and a linear layer on the last step, or on every step."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int, every: bool) -> None:
        super().__init__()
        self.every = every
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (batch, classes), or (batch, classes, length) for every step."""
        out, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.classifier(out).transpose(1, 2) if self.every else self.classifier(out[:, -1])
        return scores


def char_lstm(
    shape: tuple[int, ...], classes: int, embedding: int = 8, hidden: int = 256, layers: int = 2, every: bool = False
) -> nn.Module:
    """LEAF's network for Shakespeare: embedding of 8, LSTM of 2 × 256 (819 920 parameters for 80 characters).

    embedding, hidden, layers: sizes. every: scores after every character, for data with every=True.
    """
    _length("char_lstm", shape)
    sizes = {"embedding": embedding, "hidden": hidden, "layers": layers}
    return CharLSTM(classes, every=every, **{name: whole("char_lstm", name, size) for name, size in sizes.items()})


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each with LayerNorm before and a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.mix(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = x + self.shrink(F.gelu(self.grow(self.norm2(x))))
        return changed


class CharTransformer(nn.Module):
    """A small causal transformer with learned positions."""

    def __init__(self, length: int, classes: int, width: int, heads: int, layers: int, every: bool) -> None:
        super().__init__()
        self.every = every
        self.embedding, self.position = nn.Embedding(classes, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (batch, classes), or (batch, classes, length) for every position."""
        places = torch.arange(x.shape[1], device=x.device)
        out = self.norm(self.blocks(self.embedding(x) + self.position(places)))
        scores: Tensor = self.classifier(out).transpose(1, 2) if self.every else self.classifier(out[:, -1])
        return scores


def char_transformer(
    shape: tuple[int, ...], classes: int, width: int = 64, heads: int = 4, layers: int = 2, every: bool = False
) -> nn.Module:
    """A small causal transformer: pre-norm blocks, learned positions (115 536 parameters for 80 characters of 80).

    width: of the representation. heads, layers: of the attention. every: scores after every character.
    """
    sizes = {"width": width, "heads": heads, "layers": layers}
    checked = {name: whole("char_transformer", name, size) for name, size in sizes.items()}
    if width % heads:
        raise InputError(f"model 'char_transformer': width={width} cannot be divided among heads={heads}")
    return CharTransformer(_length("char_transformer", shape), classes, every=every, **checked)
