"""What the models know of each class, where a metric has one figure per class."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from fedflat.core.curves import titled, written
from fedflat.report.page.markup import Html, Section, table
from fedflat.report.page.page import Page
from fedflat.report.page.run_groups import Group
from fedflat.words import number, percent


def by_class(page: Page) -> Section | None:
    """A table per metric and test set: one row per class, one column per method."""
    task = page.records[0].task
    found = [
        _table(page, f"{test}_{metric}" if test else metric, share=bool(how.get("share")))
        for metric, how in task.get("metrics", {}).items()
        for test in ("", *task.get("tests", ()))
    ]
    tables = [one for one in found if one]
    if not tables:
        return None
    how = "The last evaluation, mean over the seeds. A class that never occurs in the truth has no figure."
    return Section("classes", "Class by class", how, tables, "Classes")


def _table(page: Page, metric: str, share: bool) -> Html | None:
    """The table of a metric that is recorded as METRIC_CLASS; None if it has no such figures."""
    start, rows = f"{metric}_", page.records[0].metrics
    measured: dict[str, Any] = next(
        (row for row in reversed(rows) if metric not in row), {}
    )  # a round without an evaluation has it
    names = [key for key in measured if key.startswith(start)]
    if not names:
        return None
    write = percent if share else number
    cells = [
        [name.removeprefix(start).replace("_", " "), *(write(_mean(group, name)) for group in page.groups)]
        for name in names
    ]
    return table([titled(written(metric)), *(group.label for group in page.groups)], cells, titled(written(metric)))


def _mean(group: Group, name: str) -> float | None:
    values = [value for record in group.records if (value := record.last(name)) is not None]
    return fmean(values) if values else None
