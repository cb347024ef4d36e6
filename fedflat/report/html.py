"""`report`: all there is to see of some runs in one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from fedflat.errors import InputError
from fedflat.report.page import behaviour, clients, flatness, landscapes, overview, setup, training, watched
from fedflat.report.page.markup import Html, Section, escaped, joined, tag
from fedflat.report.page.page import Page
from fedflat.report.page.series import rounded
from fedflat.report.records import Record, records_of
from fedflat.report.words import listed

if TYPE_CHECKING:
    from fedflat.result import Run

SECTIONS: tuple[Callable[[Page], Section | None], ...] = (
    *(overview.summary, setup.methods, setup.partition, training.curves, training.targets, clients.distribution),
    *(flatness.flatness, landscapes.surface, landscapes.eigenplane, landscapes.plane, landscapes.interpolation),
    *(landscapes.line, flatness.noise, flatness.layers, behaviour.generalisation, behaviour.calibration),
    *(behaviour.pruning, watched.watched, behaviour.apart, clients.interference, training.costs),
)
SCRIPTS = ("svg.js", "charts.js", "maps.js", "surface.js", "report.js")


def report(
    runs: str | Path | Iterable[Run | Record | str | Path], path: str | Path = "report.html", title: str = ""
) -> Path:
    """Write a page about runs: what was run, who did best, how flat the minima are, what it cost. Returns its path.

    runs: runs, run folders, or folders of run folders; they need not be finished, but one must have ended a round.
    Runs that differ in nothing but the seed are shown as one, with their spread. Whatever `fedflat analyze` and
    `--watch` left in the run folders is shown as well.
    """
    return write(records_of(runs), path, title)


def write(records: Sequence[Record], path: str | Path, title: str = "", reload: float = 0.0) -> Path:
    """Write the page; it is never seen half written. reload: have it load itself again after so many seconds."""
    content = document(records, title, reload)
    out = Path(path)
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


def document(records: Sequence[Record], title: str = "", reload: float = 0.0) -> str:
    """The page as text. Runs of which no round has ended are left out."""
    begun = [record for record in records if record.metrics]
    if not begun:
        where = listed([str(record.path or record.label) for record in records]) or "nothing was named, and it"
        raise InputError(f"there is nothing to report: no round has ended yet in {where}")
    page = Page(begun)
    sections = [section for make in SECTIONS if (section := make(page))]
    script = "\n".join(_asset(name) for name in SCRIPTS)
    values = {
        "title": escaped(title or _title(page)),
        "about": escaped(_about(page, len(records) - len(begun))),
        "menu": _menu(sections),
        "sections": joined(section.markup() for section in sections),
        "style": _asset("report.css"),
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": _embedded({"reload": reload, "runs": _runs(begun), "plots": rounded(page.plots)}),
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
    """The last figures of every run with all their digits, for whoever reads the page by program."""
    return [
        {"label": r.label, "folder": str(r.path or ""), "seed": r.experiment.seed, "rounds": r.rounds}
        | {name: r.last(name) for name in ("accuracy", "loss", "personal_mean")}
        for r in records
    ]


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
