"""How long the corruption of images takes: 19 corruptions × 5 severities of random CIFAR-sized images, on one core.

    python benchmarks/corruptions.py [IMAGES]

Prints CPU seconds per corruption, what 10,000 images would take, and the ratio to the 3 minutes on two cores that are
meant to be enough for them.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from fedflat.analysis.corrupted import CORRUPTIONS, SEVERITIES, corrupt

TEST_SET, ENOUGH = 10_000, 2 * 180.0  # images; seconds of one core


def main(count: int) -> None:
    """Time every corruption."""
    torch.set_num_threads(1)
    images = torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = 0.0
    for name in CORRUPTIONS:
        began = time.process_time()
        for severity in SEVERITIES:
            corrupt(images, name, severity)
        passed = time.process_time() - began
        total += passed
        print(f"{name:18} {passed:7.2f} s")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    whole = total * TEST_SET / count
    print(f"all {total:.1f} s for {count} images, so {whole:.0f} s of one core for {TEST_SET}")
    print(f"memory grew by {grown:.0f} MiB")
    print(f"ratio to {ENOUGH:.0f} s: {whole / ENOUGH:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
