"""Does fedflat work on this machine's accelerator? Prints a block to paste into an issue.

    make gpu-check                  or: python benchmarks/gpu_check.py [--device cuda:1] [--quick] [--only sam,moon]

Trains two rounds with every part on the device and on the CPU and compares: pass or fail per part, the largest
difference of a weight from the CPU's, and whether two runs on the device have the same bits. The same for worker
processes, reduced precision, compiled networks and an analysis. Then the memory taken, and the seconds per round of W1
and W2 (see speed.py) beside a bare PyTorch loop on the same device.

`--device make-believe` takes the device of the tests, which computes the CPU's bits in Python, and `--device cpu`
compares the CPU with itself: both show that the check works, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from speed import BATCH, MODELS, STEPS, Fedflat
from torch import Tensor
from torch.nn import functional as F

import fedflat
from fedflat.core.devices import kind_of, present, resolve
from fedflat.core.streams import isolated
from fedflat.data.recipes import recipe
from fedflat.errors import FedflatError
from fedflat.models import build_model
from fedflat.parts import PARTS

TOLERANCE = 1e-3  # of a weight after two rounds, relative to the largest one
ROUGHER = 0.1  # the same in reduced precision
SMALL = fedflat.Experiment(
    model="lenet5",
    clients=6,
    participation="uniform(5)",
    rounds=2,
    local_steps=2,
    batch_size=8,
    lr=0.02,
    momentum=0.5,
    backend="serial",
)


BLOCKS = "resnet56(blocks=1, width=8)"
MODEL = {"gradaug": BLOCKS, "stochdepth": BLOCKS}  # for parts that need residual blocks, or images of any size


class Outcome(NamedTuple):
    """What was found about one part or setting."""

    name: str
    verdict: str
    note: str
    difference: float = 0.0
    again: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="", help="the device to check; by default the last that this machine has")
    parser.add_argument("--quick", action="store_true", help="leave W1 and W2 out")
    parser.add_argument("--only", default="", help="parts to check, separated by commas; by default all")
    arguments = parser.parse_args()
    logging.getLogger("fedflat").setLevel(logging.ERROR)  # warnings about short runs are none of a check's business
    device = chosen(arguments.device)
    # Worker processes come first: once this process has used the device, or computed a gradient, none can be forked.
    there = SMALL.replace(device=str(device))
    pooled = None if device.type == "mps" else fedflat.run(there.replace(backend="pool"), federation=pictures()).weights
    print("```text")
    head(device)
    names = arguments.only.split(",") if arguments.only else [part.name for part in PARTS]
    found = [tell(compared(name, small(name), device)) for name in names]
    found += [tell(each) for each in settings(device, pooled)]
    failed = [each.name for each in found if each.verdict == "FAIL"]
    largest, again = max(each.difference for each in found), all(each.again for each in found)
    exact = [each.difference for each in found if each.name not in ("bfloat16", "tf32")]
    print(f"\n{len(found) - len(failed)} of {len(found)} pass or are skipped; failed: {', '.join(failed) or 'none'}")
    print(f"largest difference from the CPU {max(exact):.1e}, in reduced precision {largest:.1e}")
    print(f"two runs bit for bit: {'yes' if again else 'NO'}")
    figures = {} if arguments.quick else {name: speed(name, model, device) for name, model in MODELS.items()}
    print(memory(device))
    summary = {"device": str(device), "parts": {each.name: each.verdict for each in found}, "again": again}
    print(json.dumps(summary | {"largest": max(exact), "speed": figures}))
    print("```")
    sys.exit(1 if failed else 0)


def chosen(text: str) -> torch.device:
    """The device to check."""
    if text == "make-believe":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        from make_believe import begin

        begin()
        text = "gpu:0"
    return resolve(text or str(present()[-1]))[0]


def small(part: str) -> fedflat.Experiment:
    """The experiment that tries a part."""
    return SMALL.replace(method=part, model=MODEL.get(part, SMALL.model))


def head(device: torch.device) -> None:
    """Print what is checked, and where."""
    print(f"fedflat {version('fedflat')} on {device}: {kind_of(device).name(device)}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    if device.type == "cpu":
        print("There is no accelerator here, or the CPU was asked for: the CPU is compared with itself.")
    if device.type == "gpu":
        print("A make-believe device, which computes on the CPU: this shows that the check works, nothing else.")
    print()


def tell(outcome: Outcome) -> Outcome:
    """Print one line."""
    print(f"{outcome.name:24s} {outcome.verdict:8s} {outcome.note}", flush=True)
    return outcome


def pictures() -> fedflat.Federation:
    """Six clients with random images, which are mirrored and cropped."""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 24, 3, 32, 32), dtype=torch.uint8, generator=source)
    y = torch.randint(0, 10, (8, 24), generator=source)
    pairs = list(zip(x, y, strict=True))
    return fedflat.Federation(pairs[:6], pairs[6], [pairs[7]] * 6, classes=10, preprocess=recipe("paper000", "cifar10"))


def weights(experiment: fedflat.Experiment) -> Tensor:
    """The weights that an experiment ends with."""
    found: Tensor = fedflat.run(experiment, federation=pictures(), progress=False).weights
    return found


def compared(
    name: str,
    experiment: fedflat.Experiment,
    device: torch.device,
    tolerance: float = TOLERANCE,
    reference: fedflat.Experiment | None = None,
) -> Outcome:
    """An experiment on the CPU and twice on the device."""
    try:
        here = weights((reference or experiment).replace(device="cpu"))
    except FedflatError as error:  # it needs another setting, or diverges on random labels
        return Outcome(name, "skipped", str(error)[:80])
    there = experiment.replace(device=str(device))
    return judged(name, here, lambda: weights(there), tolerance)


def judged(name: str, here: Tensor, there: Callable[[], Tensor], tolerance: float = TOLERANCE) -> Outcome:
    """Numbers of the CPU beside those that the device gives, twice."""
    try:
        one, two = there(), there()
    except fedflat.InputError as error:
        return Outcome(name, "skipped", str(error)[:80])
    except Exception as error:
        return Outcome(name, "FAIL", f"{type(error).__name__}: {error}"[:200])
    difference = float((one - here).abs().max() / here.abs().max())
    close, again = difference <= tolerance, one.equal(two)
    note = f"difference {difference:.1e}" + ("" if again else ", and two runs differ")
    return Outcome(name, "pass" if close and again else "FAIL", note, difference, again)


def settings(device: torch.device, pooled: Tensor | None) -> list[Outcome]:
    """Worker processes, reduced precision, a compiled network, data off the device, an analysis."""
    kind, plain = kind_of(device), SMALL.replace(method="scaffold+sam", clip=1.0)
    found = [compared("data off the device", plain.replace(data_share=0), device)]
    for precision in kind.precisions[1:]:
        found.append(compared(precision, SMALL.replace(precision=precision), device, ROUGHER, SMALL))
    for mode in kind.compiles[1:]:
        found.append(compared(f"compile={mode}", SMALL.replace(compile=mode), device, reference=SMALL))
    if pooled is not None:
        found.append(judged("worker processes", weights(SMALL.replace(device="cpu")), lambda: pooled))
    with isolated(0, "check"):
        model = build_model("lenet5", (3, 32, 32), 10)
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(32) % 10

    def curvature(where: torch.device) -> Tensor:
        return fedflat.analysis.curvature(model.to(where), (x, y), k=3, trace=False, steps=20).eigenvalues

    found.append(judged("analysis (curvature)", curvature(torch.device("cpu")), lambda: curvature(device)))
    return found


def memory(device: torch.device) -> str:
    """What the device's memory holds now, and at most so far."""
    known = kind_of(device).memory(device)
    peak = f", {torch.cuda.max_memory_allocated(device) >> 20} MiB of tensors at most" if device.type == "cuda" else ""
    return (
        f"memory: {(known[1] - known[0]) >> 20} of {known[1] >> 20} MiB taken{peak}" if known else "memory: not known"
    )


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
