"""The first thing read: who did best, by how much, and how flat the minima are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from fedflat.report.comparison import Row
from fedflat.report.page.markup import Html, Section, joined, table, tag
from fedflat.report.page.page import Page, named
from fedflat.report.page.words import MISSING, TIE, duration, number, percent
from fedflat.report.records import TAIL


def summary(page: Page) -> Section:
    """Sentences that name the best, and the table of all."""
    lines = [tag("p", sentence, class_="verdict" if place == 0 else None) for place, sentence in enumerate(_said(page))]
    how = (
        f"Means over the seeds ± sample standard deviation; “tail” averages the last {percent(TAIL, 0)} of the rounds, "
        "which no single lucky round can move."
    )
    return Section("summary", "In short", how, [tag("div", *lines, class_="said"), _headline(page), _notes(page)])


def _notes(page: Page) -> Html:
    """What must be known of p-values, where there are any."""
    notes = [note for note in page.comparison.notes if note.startswith(("p:", "A test", "The runs of", "No accuracy"))]
    return tag("p", " ".join(notes), class_="small") if notes else Html()


def _said(page: Page) -> Iterator[Html]:
    rows = [row for row in page.comparison.rows if row["tail"] is not None]
    if rows:
        yield _winner(page, sorted(rows, key=lambda row: -row["tail"]))
    flat = sharpness(page)
    if len(flat) > 1:
        yield _flattest(flat, max(rows, key=lambda row: float(row["tail"]))["runs"] if rows else "")
    low = [row for row in rows if row["low5"] is not None]
    if low:
        best = max(low, key=lambda row: float(row["low5"]))
        yield joined(
            ["The worst-off 5 % of the clients fare best with ", _strong(best), f": {percent(best['low5'])}."]
            if len(low) > 1
            else ["The worst-off 5 % of the clients reach ", percent(best["low5"]), "."]
        )
    waiting = sum(row["unfinished"] for row in page.comparison.rows)
    if waiting:
        runs = "1 run is" if waiting == 1 else f"{waiting} runs are"
        yield joined([f"{runs} not finished: figures are as of the last round done."])


def _winner(page: Page, rows: list[Row]) -> Html:
    what = "accuracy" if page.metric == "accuracy" else "mean accuracy of the clients’ own models"
    first, *others = rows
    said = [_strong(first), f" reaches {percent(first['tail'])} {what}"]
    if others:
        gap = 100 * (first["tail"] - others[0]["tail"])
        said += [f", {gap:.1f} points above ", _strong(others[0])]
        doubt = max(first["tail_std"] or 0.0, others[0]["tail_std"] or 0.0)
        said += [": less than the seeds differ"] if 100 * doubt > gap else []
    return joined([*said, "."])


def _flattest(flat: dict[str, float], winner: str) -> Html:
    """Who sits in the flattest minimum, and whether that is who won."""
    ordered = sorted(flat, key=lambda label: flat[label])
    flattest, sharpest = ordered[0], ordered[-1]
    also = " also" if flattest == winner else ""
    return joined(
        [
            tag("strong", flattest),
            f"{also} found the flattest minimum: λ max {number(flat[flattest])} against {number(flat[sharpest])} of ",
            tag("strong", sharpest),
            ".",
        ]
    )


def _strong(row: Row) -> Html:
    return tag("strong", row["runs"])


def sharpness(page: Page) -> dict[str, float]:
    """Largest eigenvalue of the Hessian by group, mean over the seeds, where it was looked at."""
    for name in ("curvature", "spectrum", "density"):
        found = page.analyses(name, lambda values: float(values["eigenvalues"][0]))
        if found:
            return {group.label: fmean(values) for group, values in found}
    return {}


Column = tuple[str, Callable[[Row], str], Callable[[Row], float | None]]


def _headline(page: Page) -> Html:
    """One row a group; the best value of each column is marked."""
    columns, rows = _columns(page), page.comparison.rows
    best = {head: max((v for v in map(rank, rows) if v is not None), default=None) for head, _, rank in columns}
    body = [
        [named(group), *(_marked(text(row), rank(row), best[head], len(rows)) for head, text, rank in columns)]
        for group, row in zip(page.groups, rows, strict=True)
    ]
    what = "accuracy" if page.metric == "accuracy" else "accuracy of own models"
    return table(["method", *(head for head, *_ in columns)], body, f"Headline figures: {what}")


def _marked(text: str, value: float | None, best: float | None, rows: int) -> str:
    return tag("b", text) if value is not None and value == best and rows > 1 else text


def _columns(page: Page) -> list[Column]:
    """(head, text, what ranks it) of the columns that have something to show."""
    rows, flat = page.comparison.rows, sharpness(page)
    columns: list[Column] = [("seeds", lambda row: str(len(set(row["seeds"]))), lambda row: None)]
    columns += [_share(name, name) for name in ("tail", "last", "best")]
    if any(row["low5"] is not None for row in rows):
        columns.append(_share("lowest 5 % of clients", "low5"))
    if flat:
        columns.append(("λ max", lambda row: number(flat.get(row["runs"])), lambda row: _less(flat.get(row["runs"]))))
    if any(row["p"] is not None for row in rows):
        columns.append(("p", lambda row: MISSING if row["p"] is None else number(row["p"]), lambda row: None))
    return [*columns, ("time", lambda row: duration(row["seconds"]), lambda row: None)]


def _less(value: float | None) -> float | None:
    return None if value is None else -value


def _share(head: str, name: str) -> Column:
    def text(row: Row) -> str:
        deviation = row[f"{name}_std"]
        return percent(row[name]) + (f"{TIE}±{TIE}{100 * deviation:.1f}" if deviation is not None else "")

    def rank(row: Row) -> Any:
        return row[name]

    return head, text, rank
