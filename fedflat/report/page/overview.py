"""The first thing read: who did best, by how much, and how flat the minima are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

from fedflat.core.curves import written
from fedflat.report.comparison import Row
from fedflat.report.page.markup import Html, Section, joined, table, tag
from fedflat.report.page.page import Page, named, training_loss
from fedflat.report.significance import ENOUGH
from fedflat.runs.records import TAIL, first_measured
from fedflat.words import MISSING, TIE, duration, number, percent

OWN = ("personal_mean", "clients_mean")  # metrics of the clients on their own test data, the best model they have first


def summary(page: Page) -> Section:
    """Sentences that name the best, and the table of all."""
    lines = [tag("p", sentence, class_="verdict" if place == 0 else None) for place, sentence in enumerate(_said(page))]
    how = (
        f"Means over the seeds ± sample standard deviation. “Tail” averages the last {percent(TAIL, 0)} of the rounds, "
        "so that no single lucky round can move it."
    )
    return Section("summary", "In short", how, [tag("div", *lines, class_="said"), _headline(page), _notes(page)])


def _notes(page: Page) -> Html:
    """What the p-values are, or why there are none."""
    tests = dict.fromkeys(row["test"] for row in page.comparison.rows if row["p"] is not None)
    if tests:
        return tag(
            "p", f"p: two-sided {' or '.join(tests)} of the tails against those of the first row.", class_="small"
        )
    few = any(row["test"] == "too few seeds" for row in page.comparison.rows)
    note = f"Whether a difference is more than chance can be told from {ENOUGH} seeds of each method."
    return tag("p", note, class_="small") if few else Html()


def _said(page: Page) -> Iterator[Html]:
    rows = [row for row in page.comparison.rows if row["tail"] is not None]
    if rows:
        rows = sorted(rows, key=lambda row: row["tail"] if page.falls else -row["tail"])
        yield _winner(page, rows)
    flat = sharpness(page)
    if len(flat) > 1:
        yield _flattest(flat, rows[0]["runs"] if rows else "")
    served, low = served_clients(page), {row["runs"]: row["low5"] for row in page.comparison.rows}
    if len(served) > 1:
        yield _fairest(page, served, {label: low[label] for label in served})
    waiting = sum(row["unfinished"] for row in page.comparison.rows)
    if waiting:
        runs = "1 run is" if waiting == 1 else f"{waiting} runs are"
        yield joined([f"{runs} not finished: figures are as of the last round done."])


def _winner(page: Page, rows: list[Row]) -> Html:
    first, *others = rows
    said = [_strong(first), f" reaches {page.shown(first['tail'])} {page.what}"]
    if others:
        said += _ahead(page, first, others[0])
    return joined([*said, "."])


def _ahead(page: Page, first: Row, second: Row) -> list[str]:
    """By how much the best is ahead of the next."""
    scale, unit = (100, " points") if page.form == "percent" else (1, "")
    apart = scale * abs(first["tail"] - second["tail"])
    gap = f"{apart:.1f}" if unit else number(apart)
    if not float(gap):
        return [", as does ", _strong(second)]
    doubt = scale * max(first["tail_std"] or 0.0, second["tail_std"] or 0.0)
    side = "below" if page.falls else "above"
    return [f", {gap}{unit} {side} ", _strong(second), ": less than the seeds differ" if doubt > float(gap) else ""]


def _flattest(flat: dict[str, Sharpness], winner: str) -> Html:
    """Who has the smallest λ max, at which training loss, and whether that is who won: no claim of cause and effect."""
    ordered = sorted(flat, key=lambda label: flat[label].largest)
    flattest, sharpest = ordered[0], ordered[-1]
    also = " also" if flattest == winner else ""
    return joined(
        [
            *(tag("strong", flattest), f"{also} has the smallest λ max, {_sharp(flat[flattest])}; "),
            *(tag("strong", sharpest), f" has the largest, {_sharp(flat[sharpest])}. "),
            "Between models of different training loss the comparison says little, and a small λ max alone does not "
            "mean better generalisation.",
        ]
    )


def _sharp(found: Sharpness) -> str:
    loss = "" if found.loss is None else f" at a training loss of {number(found.loss)}"
    return f"{number(found.largest)}{loss}"


def _fairest(page: Page, served: dict[str, float], low: dict[str, float]) -> Html:
    """With whom the clients fare best on average, and with whom those who fare worst do."""
    sign = -1 if page.falls else 1
    best = max(served, key=lambda label: sign * served[label])
    kindest = max(low, key=lambda label: (sign * low[label], label == best))
    worst = "and so do the worst-off 5 % of them" if best == kindest else "the worst-off 5 % of them with "
    names = [tag("strong", best), "" if best == kindest else tag("strong", kindest)]
    return joined(
        [
            *(
                "On their own test data the clients fare best with ",
                names[0],
                f" ({page.shown(served[best])} on average), ",
            ),
            *(worst, names[1], f" ({page.shown(low[kindest])})."),
        ]
    )


def _strong(row: Row) -> Html:
    return tag("strong", row["runs"])


class Sharpness(NamedTuple):
    """Largest eigenvalue of the Hessian, and the model's loss on the same training samples; means over the seeds."""

    largest: float
    loss: float | None


def sharpness(page: Page) -> dict[str, Sharpness]:
    """How sharp the minimum of each group is, where it was looked at."""
    for name in ("curvature", "spectrum", "density"):
        found = page.analyses(name, lambda values: (float(values["eigenvalues"][0]), training_loss(values)))
        if found:
            return {group.label: _mean_sharpness(values) for group, values in found}
    return {}


def _mean_sharpness(values: list[tuple[float, float | None]]) -> Sharpness:
    losses = [loss for _, loss in values if loss is not None]
    return Sharpness(fmean(largest for largest, _ in values), fmean(losses) if losses else None)


def served_clients(page: Page) -> dict[str, float]:
    """Mean accuracy of the clients on their own test data, with their own models where they have any, by group."""
    found = {
        group.label: [record.last(first_measured([record], *OWN)) for record in group.records] for group in page.groups
    }
    kept = {label: [value for value in values if value is not None] for label, values in found.items()}
    return {label: fmean(values) for label, values in kept.items() if values}


Column = tuple[str, Callable[[Row], str], Callable[[Row], float | None]]


def _headline(page: Page) -> Html:
    """One row per group; the best value of each column is marked."""
    columns, rows = _columns(page), page.comparison.rows
    body = [
        [named(group), *(_marked(text(row), rank(row), list(map(rank, rows))) for _, text, rank in columns)]
        for group, row in zip(page.groups, rows, strict=True)
    ]
    return table(["method", *(head for head, *_ in columns)], body, f"Headline figures: {page.what}")


def _marked(text: str, value: float | None, column: list[float | None]) -> str:
    """The text, marked if its value is the highest of two or more."""
    values = [each for each in column if each is not None]
    return tag("b", text) if len(values) > 1 and value == max(values) else text


def _columns(page: Page) -> list[Column]:
    """(head, text, what ranks it) of the columns that have something to show."""
    rows, flat, served = page.comparison.rows, sharpness(page), served_clients(page)
    columns: list[Column] = [("seeds", lambda row: str(len(set(row["seeds"]))), lambda row: None)]
    columns += [_share(page, name, name) for name in ("tail", "last", "best")]
    columns += [_further(page, name) for name in further_metrics(page)]
    if served:
        columns.append(
            ("mean of clients", lambda row: page.shown(served.get(row["runs"])), lambda row: served.get(row["runs"]))
        )
        columns.append(_share(page, "worst 5 % of clients", "low5"))
    if flat:
        columns += [_curved("training loss", flat, 1), _curved(f"λ{TIE}max", flat, 0)]
    if any(row["p"] is not None for row in rows):
        columns.append(("p", lambda row: MISSING if row["p"] is None else number(row["p"]), lambda row: None))
    return [*columns, ("time", lambda row: duration(row["seconds"]), lambda row: None)]


def _curved(head: str, flat: dict[str, Sharpness], place: int) -> Column:
    """λ max, or the loss beside which it is to be read. Neither is marked: the smallest is not always the best."""

    def text(row: Row) -> str:
        return number(flat[row["runs"]][place]) if row["runs"] in flat else MISSING

    return head, text, lambda row: None


def _less(value: float | None) -> float | None:
    return None if value is None else -value


def _share(page: Page, head: str, name: str) -> Column:
    def text(row: Row) -> str:
        deviation = row[f"{name}_std"]
        spread = "" if deviation is None else f"{100 * deviation:.1f}" if page.form == "percent" else number(deviation)
        return page.shown(row[name]) + (f"{TIE}±{TIE}{spread}" if spread else "")

    def rank(row: Row) -> Any:
        return _less(row[name]) if page.falls else row[name]

    return head, text, rank


def further_metrics(page: Page) -> list[str]:
    """The other metrics of the task, and the leading one on further test sets, as far as any run has them."""
    task, lead = page.records[0].task, page.records[0].lead
    names = [name for name in task.get("metrics", {}) if name not in (lead, "loss", "iou")]
    names += [f"{test}_{lead}" for test in task.get("tests", ())]
    return [name for name in names if any(record.points(name) for record in page.records)]


def _further(page: Page, name: str) -> Column:
    """The last value of a metric besides the leading one, mean over the seeds."""
    lasts = {group.label: [v for r in group.records if (v := r.last(name)) is not None] for group in page.groups}
    means = {label: fmean(values) for label, values in lasts.items() if values}
    first = page.records[0]
    write = percent if first.is_share(name) else number
    sign = -1 if first.falls(name) else 1

    def rank(row: Row) -> float | None:
        return sign * means[row["runs"]] if row["runs"] in means else None

    return written(name), lambda row: write(means.get(row["runs"])), rank
