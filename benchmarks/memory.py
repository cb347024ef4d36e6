"""Peak memory of the main process and its workers for 100, 10,000 and 1,000,000 virtual clients.

    python benchmarks/memory.py [--method scaffold] [--rounds 20]

Each size runs in a process of its own on the embedded digits, 10 clients per round. Peak is the proportional set size
(shared pages counted once) of the whole family of processes, sampled every few milliseconds. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SIZES = (100, 10_000, 1_000_000)
ENDED = (FileNotFoundError, ProcessLookupError)  # of a process that was there a moment ago


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    members = [pid]
    with contextlib.suppress(*ENDED):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            members += family(int(child))
    return members


def memory(pid: int, kind: str = "Pss") -> float:
    """Proportional set size in MB; "Rss" for the resident one."""
    with contextlib.suppress(*ENDED):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def peak(command: list[str]) -> float:
    """Run a command and watch it."""
    process = subprocess.Popen(command)
    highest = 0.0
    while process.poll() is None:
        highest = max(highest, sum(memory(pid) for pid in family(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        sys.exit(process.returncode)
    return highest


def work(clients: int, method: str, rounds: int) -> None:
    """One run."""
    import fedflat

    experiment = fedflat.Experiment(
        data="digits",
        partition="resample(size=20)",
        clients=clients,
        participation="uniform(10)",
        model="mlp",
        method=method,
        rounds=rounds,
        local_epochs=1,
        batch_size=10,
        lr=0.05,
        workers=2,
    )
    fedflat.run(experiment, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="scaffold")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.method, arguments.rounds)
        return
    found = {}
    for clients in SIZES:
        options = ["--method", arguments.method, "--rounds", str(arguments.rounds), "--work", str(clients)]
        found[str(clients)] = round(peak([sys.executable, os.fspath(Path(__file__)), *options]), 1)
        print(f"{clients:9,d} clients: peak {found[str(clients)]:.0f} MB", flush=True)
    growth = round(found[str(SIZES[-1])] - found[str(SIZES[0])], 1)
    print(f"growth from {SIZES[0]} to {SIZES[-1]:,} clients: {growth} MB (limit 150)")
    print(json.dumps({"peak MB": found, "growth MB": growth}))


if __name__ == "__main__":
    main()
