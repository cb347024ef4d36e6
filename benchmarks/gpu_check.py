"""Does fedflat work on this machine's accelerator? Prints a block to paste into an issue.

    make gpu-check                                  or: python benchmarks/gpu_check.py [--device cuda:1] [--quick]

Trains two rounds with every part on the device and on the CPU and compares: pass or fail per part, the largest
difference of a weight from the CPU's, and whether two runs on the device have the same bits. Then the memory taken, and
the seconds per round of W1 and W2 (see speed.py) beside a bare PyTorch loop on the same device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch
from speed import BATCH, MODELS, STEPS, Fedflat
from torch.nn import functional as F

import fedflat
from fedflat.core.devices import kind_of, present, resolve
from fedflat.data.recipes import recipe
from fedflat.models import build_model
from fedflat.parts import PARTS

TOLERANCE = 1e-3  # of a weight, after two rounds, relative to the largest one
SMALL = fedflat.Experiment(
    model="lenet5",
    clients=6,
    participation="uniform(4)",
    rounds=2,
    local_steps=4,
    batch_size=16,
    lr=0.02,
    momentum=0.5,
    backend="serial",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="", help="the device to check; by default the last that this machine has")
    parser.add_argument("--quick", action="store_true", help="leave W1 and W2 out")
    arguments = parser.parse_args()
    device = resolve(arguments.device or str(present()[-1]))[0]
    print(f"fedflat on {device}: {kind_of(device).name(device)}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print(f"Python {platform.python_version()}, {platform.platform()}\n")
    if device.type == "cpu":
        print("There is no accelerator here: the CPU is compared with itself.\n")
    found = {part.name: compared(part.name, device) for part in PARTS}
    for name, result in found.items():
        print(f"{name:18s} {result['verdict']:8s} {result['note']}")
    largest = max(result["difference"] for result in found.values())
    again = all(result["again"] for result in found.values())
    print(f"\nlargest difference from the CPU {largest:.1e}; two runs bit for bit: {'yes' if again else 'NO'}")
    figures = {} if arguments.quick else {name: speed(name, model, device) for name, model in MODELS.items()}
    memory = kind_of(device).memory(device)
    if memory:
        print(f"memory: {(memory[1] - memory[0]) >> 20} of {memory[1] >> 20} MiB taken")
    verdicts = {name: result["verdict"] for name, result in found.items()}
    print(json.dumps({"device": str(device), "parts": verdicts, "largest": largest, "again": again} | figures))


def pictures() -> fedflat.Federation:
    """Six clients with random images, which are mirrored and cropped."""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 32, 3, 32, 32), dtype=torch.uint8, generator=source)
    y = torch.randint(0, 10, (8, 32), generator=source)
    pairs = list(zip(x, y, strict=True))
    return fedflat.Federation(pairs[:6], pairs[6], [pairs[7]] * 6, classes=10, preprocess=recipe("paper000", "cifar10"))


def compared(method: str, device: torch.device) -> dict[str, Any]:
    """The weights of a method on the CPU and twice on the device."""
    try:
        here = fedflat.run(SMALL.replace(method=method, device="cpu"), federation=pictures()).weights
    except fedflat.InputError as error:
        return {"verdict": "skipped", "note": str(error)[:80], "difference": 0.0, "again": True}
    try:
        there = SMALL.replace(method=method, device=str(device))
        one, two = (fedflat.run(there, federation=pictures()).weights for _ in range(2))
    except Exception as error:
        return {"verdict": "FAIL", "note": f"{type(error).__name__}: {error}"[:200], "difference": 0.0, "again": True}
    difference = float((one - here).abs().max() / here.abs().max())
    close, again = difference <= TOLERANCE, one.equal(two)
    note = f"difference {difference:.1e}" + ("" if again else ", and two runs differ")
    return {"verdict": "pass" if close and again else "FAIL", "note": note, "difference": difference, "again": again}


def speed(workload: str, model: str, device: torch.device) -> dict[str, float]:
    """Seconds per round of fedflat and of a bare loop, measured in turns."""
    rival = Fedflat(model)
    rival.experiment = rival.experiment.replace(device=str(device), backend="serial", workers=None)
    table = [(rival.seconds(2), bare(model, device)) for _ in range(3)]
    ours, theirs = (statistics.median(column) for column in zip(*table, strict=True))
    print(f"{workload} ({model}): {ours:.3f} s per round; bare PyTorch {theirs:.3f} s, ratio {theirs / ours:.2f}")
    return {"fedflat": ours, "bare": theirs}


def bare(model: str, device: torch.device) -> float:
    """Seconds for as many steps as a round has, on ready batches."""
    module = build_model(model, (3, 32, 32), 10).to(device)
    x, y = torch.randn(10, BATCH, 3, 32, 32, device=device), torch.randint(0, 10, (BATCH,)).to(device)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
    for counted in (False, True):
        start = time.perf_counter()
        for step in range(STEPS if counted else 10):
            optimiser.zero_grad()
            loss = F.cross_entropy(module(x[step % 10]), y)
            loss.backward()
            optimiser.step()
        loss.item()  # waits for the device
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
