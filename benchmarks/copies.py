"""How much goes between host and device: copies and bytes per client and round, and per local step.

    python benchmarks/copies.py [--device cuda] [--model cnn64] [--methods fedavg,scaffold]

Counts are differences between runs that differ in the number of rounds or of local steps only, so data and tables that
are copied once per run do not count. On CUDA the counts are those of PyTorch's profiler ("Memcpy"). Without a device
named, they are those of the tests' make-believe device, which counts the same copies and needs no GPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_check import pictures

import fedflat

CLIENTS, STEPS = 6, 4
DOWN, UP = "to the device", "to the host"
Count = Counter[tuple[str, str]]  # (direction, "copies" or "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="make-believe")
    parser.add_argument("--model", default="cnn64")
    parser.add_argument("--methods", default="fedavg,scaffold,feddyn,fedavg+sam,ditto", help="separated by commas")
    arguments = parser.parse_args()
    logging.getLogger("fedflat").setLevel(logging.ERROR)
    counted, device = counter(arguments.device)
    print(f"{arguments.model} on {device}, {CLIENTS} clients per round, batch 8, images mirrored and cropped\n")
    print("| method | per client and round | to the device | to the host | per step | to the device |")
    print("|---|--:|--:|--:|--:|--:|")
    for method in arguments.methods.split(","):
        experiment = fedflat.Experiment(
            method=method,
            model=arguments.model,
            participation="all",
            batch_size=8,
            backend="serial",
            device=device,
            evaluate_every=0,
            evaluate_clients=None,
            lr=0.01,
        )
        print(row(method, lambda rounds, steps, e=experiment: counted(e.replace(rounds=rounds, local_steps=steps))))


def row(method: str, count: Callable[[int, int], Count]) -> str:
    """The counts of a method: of a client's round without its steps, and of one step."""
    count(1, 1)
    short, long, busy = count(2, STEPS), count(3, STEPS), count(3, 2 * STEPS)
    whole = {key: (long[key] - short[key]) / CLIENTS for key in long | short}
    step = {key: (busy[key] - long[key]) / (3 * CLIENTS * STEPS) for key in busy | long}
    rest = {key: value - STEPS * step.get(key, 0) for key, value in whole.items()}
    sizes = [rest.get((way, "bytes"), 0) for way in (DOWN, UP)] + [step.get((DOWN, "bytes"), 0)]
    copies = [rest.get((way, "copies"), 0) for way in (DOWN, UP)] + [step.get((DOWN, "copies"), 0)]
    shown = [f"{many:.1f} of {size / 1e6:.3f} MB" for many, size in zip(copies[:2], sizes[:2], strict=True)]
    return (
        f"| `{method}` | {sum(copies[:2]):.1f} copies | {shown[0]} | {shown[1]} | {copies[2]:.1f} | {sizes[2]:.0f} B |"
    )


def counter(device: str) -> tuple[Callable[[fedflat.Experiment], Count], str]:
    """A function that runs an experiment and counts its copies, and the device's name."""
    if device != "make-believe":
        return profiled, device
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from make_believe import HERE, begin

    begin()

    def counted(experiment: fedflat.Experiment) -> Count:
        HERE.copies.clear(), HERE.bytes.clear()
        fedflat.run(experiment, federation=pictures(), progress=False)
        ways = {"cpu to gpu": DOWN, "gpu to cpu": UP}
        found = Count({(way, "copies"): HERE.copies[name] for name, way in ways.items()})
        return found + Count({(way, "bytes"): HERE.bytes[name] for name, way in ways.items()})

    return counted, "gpu:0"


def profiled(experiment: fedflat.Experiment) -> Count:
    """Copies that PyTorch's profiler sees."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        fedflat.run(experiment, federation=pictures(), progress=False)
        torch.cuda.synchronize()
    found, ways = Count(), {"Memcpy HtoD": DOWN, "Memcpy DtoH": UP}
    for event in seen.profiler.kineto_results.events():
        way: Any = next((way for name, way in ways.items() if event.name().startswith(name)), None)
        if way is not None:
            found[way, "copies"] += 1
            found[way, "bytes"] += event.nbytes()
    return found


if __name__ == "__main__":
    main()
