"""Carry finished runs from one machine to another, without their weights.

    python benchmarks/records.py pack FOLDER FILE.tar.xz      # the finished runs anywhere below FOLDER
    python benchmarks/records.py unpack FILE.tar.xz FOLDER    # adds those that FOLDER does not have

`fedflat leaderboard --out FOLDER` and `fedflat reproduce --out FOLDER` then take these runs as finished and make only
those that are missing, so a long table can be made in several sittings. What is packed: the experiment, one row per
round, the environment and the results of analyses. A run without its weights can be compared and drawn, but neither
analysed anew nor continued.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

from fedflat.errors import CheckpointError
from fedflat.experiment import Experiment
from fedflat.runs.series import Member

KEPT = ("experiment.toml", "environment.json", "checkpoint.json", "metrics.jsonl", "round-time.json", "analysis/*.json")


def finished(folder: Path) -> list[Path]:
    """The folders of finished runs."""
    found = []
    for path in sorted(folder.rglob("experiment.toml")):
        try:
            whole = Member(Experiment.from_toml(path), path.parent).finished
        except CheckpointError:
            continue
        found += [path.parent] if whole else []
    return found


def pack(folder: Path, archive: Path) -> int:
    """Write the archive; the same runs give the same bytes."""
    runs = finished(folder)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for pattern in KEPT:  # like beside like, which compresses better
            for path in (path for run in runs for path in sorted(run.glob(pattern))):
                content, entry = path.read_bytes(), tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return len(runs)


def unpack(archive: Path, folder: Path) -> int:
    """Add the runs of the archive that the folder does not have."""
    with tarfile.open(archive) as tar:
        runs = {Path(name).parent for name in tar.getnames() if name.endswith("experiment.toml")}
        new = {run for run in runs if not (folder / run).exists()}
        members = [entry for entry in tar if new & set(Path(entry.name).parents)]
        tar.extractall(folder, members, filter="data")
    return len(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if not arguments.source.exists():
        parser.error(f"there is no {arguments.source}")
    made = (pack if arguments.what == "pack" else unpack)(arguments.source, arguments.target)
    print(f"{made} runs {'packed into' if arguments.what == 'pack' else 'added to'} {arguments.target}")


if __name__ == "__main__":
    main()
