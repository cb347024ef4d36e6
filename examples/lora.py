"""Fine-tuning a few weights: a small transformer, trained on some documents, adapts to others by LoRA.

Low-rank adaptation (Hu et al., 2022) leaves every weight of the network as it is and adds to chosen linear layers a
product B·A of two thin matrices. Only A and B are trained, so only they are sent: weights with `requires_grad=False`
are in no vector, no message and no client's state.

    python examples/lora.py [--rounds 4] [--rank 4]
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from text import ALPHABET, WINDOW, encoded, windows
from text import HOME as FOLDER
from torch import Tensor, nn

import fedflat
from fedflat.models import build_model

KNOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/concepts.md")
NEW = ("docs/results.md", "docs/performance.md", "docs/findings.md")


class LoRA(nn.Module):
    """A frozen linear layer W, and beside it a trained B·A of low rank; B is zero at first, so nothing changes yet."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """W x + scale · B A x."""
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def with_lora(network: nn.Module, rank: int) -> nn.Module:
    """A copy of the network with all its weights frozen and LoRA in the linear layers of its blocks."""
    network = copy.deepcopy(network).requires_grad_(False)
    for module in list(network.blocks.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, LoRA(layer, rank))
    return network


def federation(documents: tuple[str, ...]) -> fedflat.Federation:
    """One client per document; the last fifth of each is test data."""
    texts = [encoded((FOLDER / name).read_text())[:12_000] for name in documents]
    train = [windows(text[: 4 * len(text) // 5]) for text in texts]
    x, y = zip(*(windows(text[4 * len(text) // 5 :]) for text in texts), strict=True)
    return fedflat.Federation(train, (torch.cat(x), torch.cat(y)), classes=len(ALPHABET), name="documents")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    network = build_model("char_transformer(every=True)", (WINDOW,), len(ALPHABET))
    e = fedflat.Experiment(
        rounds=arguments.rounds, local_epochs=1, batch_size=32, optimizer="adamw", lr=0.003, weight_decay=0.01
    )
    base = fedflat.run(e, federation=federation(KNOWN), model=network, progress=False)
    print(f"trained on {len(KNOWN)} documents: {bits(base.metrics[-1])} bits per character there")
    new = federation(NEW)
    for name, start in (("all weights", base.model), ("LoRA", with_lora(base.model, arguments.rank))):
        run = fedflat.run(e, federation=new, model=start, progress=False)
        row, frozen = run.metrics[-1], run.details.get("frozen", 0)
        share = row["floats_up"] / base.weights.numel()
        print(f"{name}: {row['floats_up']} weights sent per client and round ({share:.1%}), {frozen} frozen")
        print(f"    after {arguments.rounds} rounds {bits(row)} bits per character of {len(NEW)} new documents")


def bits(row: dict[str, float]) -> str:
    """The loss in bits."""
    return f"{row['loss'] / math.log(2):.2f}"


if __name__ == "__main__":
    main()
