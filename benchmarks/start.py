"""From `fedflat run` on the digits to the end of the first round, beyond `import torch`; medians of several starts.

    python benchmarks/start.py [--repeats 5]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

RUN = [sys.executable, "-m", "fedflat", "run", "--data", "digits", "--model", "mlp", "--clients", "20"]
RUN += ["--participation", "uniform(5)", "--rounds", "1", "--quiet"]


def seconds(command: list[str]) -> float:
    """How long a command takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    differences, totals, helps = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(repeats):
            bare = seconds([sys.executable, "-c", "import torch"])
            totals.append(seconds([*RUN, "--out", f"{folder}/{k}"]))
            differences.append(totals[-1] - bare)
            helps.append(seconds([sys.executable, "-m", "fedflat", "--help"]))
    found = {
        "seconds beyond import torch": round(statistics.median(differences), 3),
        "seconds in all": round(statistics.median(totals), 3),
        "seconds of --help": round(statistics.median(helps), 3),
    }
    for name, value in found.items():
        print(f"{name:28s} {value:.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
