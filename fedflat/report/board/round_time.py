"""What a round of every method costs, in turns with FedAvg's; the figures lie in the run folders of the first seeds.

The times that runs take are no measure of it: other runs, and other programs, come and go beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from fedflat.cost import in_turns
from fedflat.data import Federation
from fedflat.errors import RoundLostError
from fedflat.experiment import Experiment
from fedflat.report.board.entry import BASELINE, Entry
from fedflat.runs.files import write_atomically
from fedflat.runs.sharing import locked

FILE, KEY = "round-time.json", f"seconds ÷ {BASELINE}"
ROUNDS, CLIENTS = 5, 4  # that are timed; clients train one after the other


def time_rounds(entries: Sequence[Entry], federation: Callable[[Experiment], Federation]) -> None:
    """Set the times of entries that have runs. What is in their run folders is not measured again.

    Args:
        entries: Those of one setting.
        federation: Gives the data of an experiment.
    """
    base = next((entry for entry in entries if entry.method == BASELINE), None)
    if base is None:
        return
    usual = base.records[0].experiment
    data = federation(usual)
    clients = range(min(CLIENTS, len(data)))
    for entry in locked(entries, lambda entry: entry.folder, lambda entry: entry is base or _file(entry).exists()):
        try:
            found = in_turns({"own": entry.records[0].experiment, "usual": usual}, data, ROUNDS, clients=clients)
        except RoundLostError:  # with so few clients it may diverge
            continue
        ratio = median(own / other for own, other in zip(found["own"], found["usual"], strict=True))
        content = {KEY: round(ratio, 4), "rounds": ROUNDS, "clients": len(clients)}
        write_atomically(_file(entry), (json.dumps(content, ensure_ascii=False) + "\n").encode())
    base.time = 1.0
    for entry in (entry for entry in entries if _file(entry).exists()):
        entry.time = json.loads(_file(entry).read_text())[KEY]


def _file(entry: Entry) -> Path:
    return entry.folder / FILE
