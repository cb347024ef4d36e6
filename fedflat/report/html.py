"""`report`: everything about some runs in one HTML file that loads no other file."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedflat.errors import InputError
from fedflat.report.page import (
    behaviour_section,
    class_section,
    client_section,
    flatness,
    landscapes,
    overview,
    picture_section,
    setup_section,
    training,
    watched,
)
from fedflat.report.page.markup import Html, Section, breakable, escaped, joined, tag
from fedflat.report.page.page import Page
from fedflat.report.page.run_groups import rounded
from fedflat.runs.records import Record, RunLike, records_of
from fedflat.words import listed

SECTIONS: tuple[Callable[[Page], Section | None], ...] = (
    *(overview.summary, setup_section.methods, setup_section.partition, training.curves, training.targets),
    *(picture_section.pictures, class_section.by_class),
    *(client_section.distribution, flatness.flatness, landscapes.surface, landscapes.eigenplane, landscapes.plane),
    *(landscapes.interpolation, landscapes.line, flatness.noise, flatness.layers, behaviour_section.generalisation),
    *(
        behaviour_section.calibration,
        behaviour_section.corruptions,
        behaviour_section.pruning,
        watched.watched,
        behaviour_section.apart,
    ),
    *(client_section.interference, training.costs),
)
MARK, SOON = b'<meta name="generator" content="fedflat">', 4096  # what tells our pages, and how early they say it
SCRIPTS = ("svg.js", "charts.js", "maps.js", "surface.js", "tools.js", "tables.js", "report.js")


def report(
    runs: str | Path | Iterable[RunLike | Record | str | Path], path: str | Path = "report.html", title: str = ""
) -> Path:
    """Write an HTML page about runs: settings, results, flatness of the minima, cost. Returns its path.

    Runs that differ only in the seed are shown together, with their spread. The page includes the results of
    `fedflat analyze` and `--watch` in the run folders.

    Args:
        runs: Runs, run folders, or folders of run folders. They may be unfinished, but one must have finished a round.
    """
    return write(records_of(runs), path, title)


def write(records: Sequence[Record], path: str | Path, title: str = "", reload: float = 0.0) -> Path:
    """Write the page atomically. reload: number of seconds after which the page reloads itself; 0 for never."""
    content, out = document(records, title, reload), Path(path)
    if out.is_file() and MARK not in out.read_bytes()[:SOON]:
        raise InputError(f"{out} exists and is not a report of fedflat; choose another file")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InputError(f"the report cannot be written to {out}: {error.strerror}; choose another file") from None
    return out


def document(records: Sequence[Record], title: str = "", reload: float = 0.0, live: bool = False) -> str:
    """The page as text. Runs without a finished round are left out. live: whether a server tells it of changes."""
    begun = [record for record in records if record.metrics]
    if not begun:
        where = listed([str(record.path or record.label) for record in records]) or "nothing was named, and it"
        raise InputError(f"there is nothing to report: no round has ended yet in {where}")
    page = Page(begun)
    sections = [section for make in SECTIONS if (section := make(page))]
    script = "\n".join(_asset(name) for name in SCRIPTS)
    name = title or _title(page)
    values = {
        "title": escaped(name),
        "head": breakable(name),
        "about": escaped(_about(page, len(records) - len(begun))),
        "menu": _menu(sections),
        "sections": joined(section.markup() for section in sections),
        "connect": "connect-src 'self'; " if live else "",
        "style": _asset("report.css"),
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": _embedded({"reload": reload, "live": live, "runs": _runs(begun), "plots": rounded(page.plots)}),
    }
    return Template(_asset("report.html")).substitute(values)


def _asset(name: str) -> str:
    return resources.files("fedflat.report.page").joinpath(name).read_text(encoding="utf-8")


def _title(page: Page) -> str:
    names = list(dict.fromkeys(record.experiment.method for record in page.records))
    data = listed(list(dict.fromkeys(record.experiment.data for record in page.records)))
    return f"{listed(names)} on {data}" if len(names) <= 3 else f"{len(names)} methods on {data}"


def _about(page: Page, waiting: int) -> str:
    """One line below the title."""
    runs, seeds = len(page.records), len({record.experiment.seed for record in page.records})
    counts = f"{runs} run{'s'[: runs > 1]} of {len(page.groups)} set-up{'s'[: len(page.groups) > 1]}"
    late = f"; {waiting} more without a finished round" if waiting else ""
    return f"{counts}, {seeds} seed{'s'[: seeds > 1]}, up to {max(r.rounds for r in page.records)} rounds{late}"


def _menu(sections: Sequence[Section]) -> Html:
    return joined(tag("a", section.menu or section.title, href=f"#{section.key}") for section in sections)


def _runs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The last metrics of every run with all digits, for programs that read the page."""
    return [
        {"label": r.label, "folder": str(r.path or ""), "seed": r.experiment.seed, "rounds": r.rounds}
        | {name: r.last(name) for name in dict.fromkeys((r.lead, "loss", "personal_mean"))}
        for r in records
    ]


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot close the script element that contains it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
