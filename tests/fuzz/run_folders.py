"""Run folders of strangers: nothing unexpected, nothing lost, nothing silently wrong."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path

import torch

import fedflat
from fedflat.cli import main
from fedflat.errors import FedflatError, RunError
from fuzz.mutants import mutant

EXP = fedflat.Experiment(
    data="digits", model="logistic", clients=4, participation="uniform(2)", rounds=3, method="scaffold", lr=0.05
)
EXP = EXP.replace(backend="serial", evaluate_clients=None)


class Enough(fedflat.Callback):
    """Ends a run after two rounds."""

    def round(self, run: fedflat.Run, metrics: object) -> bool:
        return len(run.metrics) == 2


def make(place: Path) -> list[Path]:
    """A finished run and an unfinished one."""
    fedflat.run(EXP, out=place / "whole")
    fedflat.run(EXP, out=place / "part", callbacks=[Enough()])
    return [place / "whole", place / "part"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def command(*words: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(list(words))
    return status, said.getvalue()


def guarded(what: str, action: Callable[[], str]) -> str:
    """What `action` finds wrong; an error that is none of the library's is wrong."""
    try:
        return action()
    except FedflatError:
        return ""
    except OSError as error:
        return "" if error.filename or error.errno else f"{what}: {error}"
    except Exception as error:
        return f"{what}: unexpected {type(error).__name__}: {str(error)[:200]}"


def looked_at(folder: Path, page: Path) -> list[str]:
    """Look at a folder in every way; it must not change."""
    before, wrong = contents(folder), []
    for words in (["show", str(folder)], ["compare", str(folder)], ["report", str(folder), "--out", str(page)]):
        status, said = command(*words)
        if "unexpected" in said or "Traceback" in said or "\x1b[2J" in said or status not in (0, 1, 2):
            wrong.append(f"{words[0]}: {said[-300:]}")
    wrong.append(guarded("load_run", lambda: str(fedflat.load_run(folder).status)[:0]))
    if contents(folder) != before:
        wrong.append("looking at it changed it")
    return [text for text in wrong if text]


def gone_on_with(folder: Path, end: torch.Tensor) -> str:
    """Go on with a folder: the right end, or a refusal that changes nothing."""
    before = contents(folder)
    try:
        run = fedflat.run(EXP, out=folder)
    except RunError:  # it had begun: more may be there, but not less
        return f"lost: {missing}" if (missing := before.keys() - contents(folder).keys()) else ""
    except (FedflatError, OSError):
        return "" if contents(folder) == before else "lost: a refusal changed files"
    lost = before.keys() - contents(folder).keys() - {name for name in before if "checkpoint-0" in name}
    lost = {name for name in lost if not name.startswith("clients")}
    if lost:
        return f"lost: {sorted(lost)}"
    return "" if torch.equal(run.weights, end) else "silently wrong: other weights"


def folders(place: Path, count: int, first: int = 0) -> list[str]:
    """What is wrong with so many damaged folders."""
    originals, failures = make(place), list[str]()
    end = fedflat.load_run(originals[0]).weights
    for number in range(first, first + count):
        luck, target = random.Random(number), place / str(number)
        what = mutant(originals[number % 2], target, luck)
        wrong = looked_at(target, place / "page.html")
        wrong.append(guarded("run", lambda target=target: gone_on_with(target, end)))
        failures += [f"{number} ({what}): {text}" for text in wrong if text]
    return failures
