"""Your own network, your own clients and your own loss, from tensors to predictions.

Eight clients photograph digits, two each with the camera upright, turned left, upside down and turned right, and keep
a fifth of their images as a test set. One model for all is compared with one in which every client has a head of its
own. The digits are the embedded ones, so nothing is downloaded.

    python examples/own_model_and_data.py [--rounds 20] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat

Pair = tuple[Tensor, Tensor]
METHODS = ("fedavg", "fedrep(head_epochs=2)")
CLIENTS, TURNS = 8, ("upright", "turned left", "upside down", "turned right")


class Net(nn.Module):
    """An ordinary module: nothing in it knows of fedflat."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Ten scores per sample."""
        return self.head(self.body(x))


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    """A loss takes the output and the targets and returns the mean over the batch."""
    return F.cross_entropy(output, y, label_smoothing=0.05)


def images() -> Pair:
    """All training images of the digits, 8×8, as floating point: such data reach the model as they are."""
    pool = fedflat.load_federation("digits", "central", clients=1).samples(0)
    x, y = pool.batch(torch.arange(len(pool)))
    return x.float() / 8 - 1, y


def clients() -> tuple[list[Pair], list[Pair]]:
    """Training and test data of every client."""
    x, y = images()
    train, tests = [], []
    for i in range(CLIENTS):
        own, labels = torch.rot90(x[i::CLIENTS], i % len(TURNS), (2, 3)), y[i::CLIENTS]
        cut = len(labels) // 5
        train.append((own[cut:], labels[cut:]))
        tests.append((own[:cut], labels[:cut]))
    return train, tests


def trained(method: str, rounds: int, out: Path | None) -> fedflat.Run:
    """One run of a method on these clients."""
    train, tests = clients()
    everything = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])
    federation = fedflat.Federation(train, test=everything, client_tests=tests)
    experiment = fedflat.Experiment(method=method, rounds=rounds, local_epochs=2, batch_size=16, lr=0.1, lr_decay=1.0)
    torch.manual_seed(0)  # your module's first weights are yours to seed
    return fedflat.run(
        experiment,
        federation=federation,
        model=Net(),
        loss=smoothed,
        participants=lambda t: [(4 * t + k) % CLIENTS for k in range(4)],  # one half, then the other
        out=out and out / method.partition("(")[0],
        progress=False,
    )


def shown(accuracy: float | None) -> str:
    """A client that has never trained has no head yet."""
    return f"{'–':>8}" if accuracy is None else f"{accuracy:8.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="keep the runs here; run again to go on with them")
    arguments = parser.parse_args()

    common, own = (trained(method, arguments.rounds, arguments.out) for method in METHODS)
    print(f"one model for all is right on {common.metrics[-1]['accuracy']:.1%} of all test images")
    print("client by client, with one model for all, and with a head of its own on a common body:")
    for row, other in zip(common.evaluations, own.evaluations, strict=True):
        turn = TURNS[row["client"] % len(TURNS)]
        print(f"  client {row['client']}, {turn:14}{row['common']:6.1%}{shown(other['personal'])}")
    print(f"  mean {'':19}{common.fairness().mean:6.1%}{shown(own.fairness().mean)}")
    x, y = clients()[1][2]
    with torch.no_grad():
        guesses = common.model(x[:10]).argmax(1)  # run.model is a Net with the trained weights
    print(f"ten digits upside down, {y[:10].tolist()}, the common model reads as {guesses.tolist()}")


if __name__ == "__main__":
    main()
