"""Text: a next-character model of this project's own documents, one client per document.

Every document is a client with a vocabulary, a subject and a length of its own. The last fifth of each is its test set.
A small network reads windows of 32 characters and predicts, at each place, the one that follows from the last eight.

    python examples/text.py [--rounds 15] [--method fedavg+sam]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import fedflat

HOME = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs/results.md", "docs/performance.md")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else is read as the last one
WINDOW, STRIDE = 32, 16


class Reader(nn.Module):
    """Scores (batch, characters, places), the layout in which PyTorch's cross-entropy takes sequences."""

    def __init__(self, context: int = 8, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), 16)
        self.body = nn.Sequential(nn.ConstantPad1d((context - 1, 0), 0.0), nn.Conv1d(16, width, context), nn.ReLU())
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of what follows each character, given it and those before it."""
        return self.head(self.body(self.letters(x).transpose(1, 2)).transpose(1, 2)).transpose(1, 2)


def encoded(text: str) -> Tensor:
    """The text as numbers of the alphabet."""
    return torch.tensor([ALPHABET.find(c) % len(ALPHABET) for c in text])


def windows(text: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of the text, and the same a character further on."""
    starts = range(0, len(text) - WINDOW, STRIDE)
    x, y = (torch.stack([text[s + ahead : s + ahead + WINDOW] for s in starts]) for ahead in (0, 1))
    return x, y


def federation() -> fedflat.Federation:
    """One client per document; integer inputs reach the model as they are."""
    texts = [encoded((HOME / name).read_text()) for name in DOCUMENTS]
    cuts = [4 * len(text) // 5 for text in texts]
    tests = [windows(text[cut:]) for text, cut in zip(texts, cuts, strict=True)]
    everything = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])
    train = [windows(text[:cut]) for text, cut in zip(texts, cuts, strict=True)]
    return fedflat.Federation(train, everything, tests, classes=len(ALPHABET), name="documents")


def guessing(data: fedflat.Federation) -> float:
    """Bits per character of a model that knows only how often each one occurs in the training data."""
    counts = torch.ones(len(ALPHABET))
    for client in range(len(data)):
        _, y = data.samples(client).batch(torch.arange(data.size(client)))
        counts += torch.bincount(y.flatten(), minlength=len(ALPHABET))
    _, y = data.test.batch(torch.arange(len(data.test)))
    return float(-(counts / counts.sum()).log2()[y].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--method", default="fedavg")
    arguments = parser.parse_args()

    data = federation()
    torch.manual_seed(0)
    experiment = fedflat.Experiment(
        method=arguments.method,
        participation="all",
        rounds=arguments.rounds,
        local_epochs=2,
        batch_size=16,
        lr=1.0,
        lr_decay=1.0,
        clip=1.0,
        weight_decay=0.0,
    )
    run = fedflat.run(experiment, federation=data, model=Reader(), progress=False)

    last = run.metrics[-1]
    print(f"{arguments.method}: {len(data)} documents, {data.sizes.sum()} windows, {last['round']} rounds")
    print(f"bits per character: {last['loss'] / math.log(2):.2f}; by letter frequencies alone {guessing(data):.2f}")
    print(f"characters predicted: {last['accuracy']:.1%} of all; document by document:")
    for row in run.evaluations:
        print(
            f"  {DOCUMENTS[row['client']]:22}{row['common']:6.1%}   ({data.size(row['client'])} windows to learn from)"
        )


if __name__ == "__main__":
    main()
