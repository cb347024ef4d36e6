"""What tasks besides small images cost: python benchmarks/tasks.py [--only step,reading,memory,corruptions]

step: a local step of bisenetv2 on masks that are augmented with their images ÷ a bare loop on ready batches, in turns.
reading: the share of the time in which two workers are busy while every image is decoded from a JPEG file, 64 pixels.
memory: growth of the peak memory when all images of a folder are read twice, for a folder twice as large as the cache ÷
one as large as the cache.
corruptions: seconds for 10,000 CIFAR images × 19 × 5 on two cores, extrapolated from some of them, ÷ 180 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import corruptions
import numpy as np
import torch
from torch.nn import functional as F

import fedflat
from fedflat.core.processes import keep_pages
from fedflat.data.image_files import Cache, ImageFiles
from fedflat.data.joint import JointPreprocess
from fedflat.models import build_model

NETWORK, SHAPE, BATCH, STEPS = "bisenetv2(width=0.5, head=128, aux=False)", (3, 96, 128), 6, 8
DOMAINS, CLASSES, IMAGES = ("art_painting", "cartoon", "photo", "sketch"), ("dog", "house"), 60
CACHE, SIDE = 32 << 20, 128


def step(repeats: int) -> dict[str, float]:
    """The shortest round of fedflat and of a bare loop, per step."""
    torch.set_num_threads(1)
    keep_pages()
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (BATCH * STEPS, *SHAPE), dtype=torch.uint8, generator=draw)
    y = torch.randint(11, (BATCH * STEPS, *SHAPE[1:]), generator=draw)
    change = JointPreprocess((0.5,), (0.5,), flip=0.5)
    data = fedflat.Federation([(x, y)], classes=11, task="segmentation", preprocess=change)
    e = fedflat.Experiment(model=NETWORK, rounds=3, local_epochs=1, batch_size=BATCH, momentum=0.9, clip=None)
    model = build_model(NETWORK, SHAPE, 11).to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    ready = change(x[:BATCH], None).contiguous(memory_format=torch.channels_last)
    ours, bare = list[float](), list[float]()
    for _ in range(repeats):
        run = fedflat.run(e.replace(backend="serial"), federation=data, progress=False)
        ours += [row["seconds"] / STEPS for row in run.metrics[1:]]
        for _ in range(2):
            began = time.perf_counter()
            for _ in range(STEPS):
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(model(ready), y[:BATCH]).backward()
                optimiser.step()
            bare.append((time.perf_counter() - began) / STEPS)
    print(f"step: {1000 * min(ours):.0f} ms ours, {1000 * min(bare):.0f} ms bare: {min(ours) / min(bare):.3f}")
    return {"step": min(ours) / min(bare)}


class Busy(fedflat.Callback):
    """CPU seconds of the child processes and the time, at the end of every round."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def round(self, run: fedflat.Run, metrics: dict[str, Any]) -> None:
        """Note both."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
        ticks = sum(int(field[11]) + int(field[12]) for field in fields)
        self.points.append((ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter()))


def reading() -> dict[str, float]:
    """How busy two workers are that decode every image."""
    from PIL import Image

    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for domain in DOMAINS:
            for name in CLASSES:
                home = Path(folder) / "PACS" / domain / name
                home.mkdir(parents=True)
                for number in range(IMAGES):
                    noise = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
                    noise.resize((227, 227)).save(home / f"{number}.jpg", quality=85)
        data = "pacs(per_domain=2, size=64, cache=1)"
        e = fedflat.Experiment(data=data, model="cnn_tiny", rounds=8, local_epochs=2, batch_size=20, lr=0.01)
        busy = Busy()
        e = e.replace(workers=2, evaluate_every=0, evaluate_clients=None, participation="all")
        fedflat.run(e, root=folder, progress=False, callbacks=[busy])
    (cpu, start), (later, end) = busy.points[0], busy.points[-2]  # not the first round, nor the evaluation
    share = (later - cpu) / (2 * (end - start))
    print(f"reading: two workers are busy for {100 * share:.0f} % of the time")
    return {"reading": share}


def _grown(folder: str, pipe: Any) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
    before = _peak()
    paths = sorted(Path(folder).iterdir())
    files = ImageFiles(paths, torch.zeros(len(paths), dtype=torch.int64), (SIDE, SIDE), Cache(CACHE))
    for _ in range(2):
        for start in range(0, len(paths), 20):
            files.batch(torch.arange(start, min(start + 20, len(paths))))
    pipe.send(_peak() - before)


def _peak() -> float:
    """The peak memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def memory() -> dict[str, float]:
    """Growth of the peak memory for folders as large as the cache, and twice as large."""
    from PIL import Image

    grown, context = dict[int, float](), multiprocessing.get_context("spawn")
    for factor in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            Image.effect_noise((SIDE, SIDE), 60).convert("RGB").save(Path(folder) / "0.jpg")
            for number in range(1, factor * CACHE // (3 * SIDE * SIDE)):
                (Path(folder) / f"{number}.jpg").hardlink_to(Path(folder) / "0.jpg")
            ours, theirs = context.Pipe()
            process = context.Process(target=_grown, args=(folder, theirs))
            process.start()
            grown[factor] = ours.recv()
            process.join()
    ratio = grown[2] / grown[1]
    print(f"memory: cache {CACHE >> 20} MiB; grows by {grown[1]:.0f} and {grown[2]:.0f} MiB: {ratio:.2f}")
    return {"memory": ratio}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="step,reading,memory,corruptions")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--images", type=int, default=200, help="images that are corrupted")
    given, found = parser.parse_args(), dict[str, float]()
    for name in given.only.split(","):
        if name == "corruptions":
            corruptions.main(given.images)
        else:
            found |= step(given.repeats) if name == "step" else {"reading": reading, "memory": memory}[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
