"""How training went: curves over the rounds, rounds to targets, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

from fedflat.core.curves import titled, written
from fedflat.report.chart import round_step
from fedflat.report.comparison import Row, reached
from fedflat.report.figures import LONG
from fedflat.report.page.markup import Html, Section, joined, table, tag
from fedflat.report.page.overview import further_metrics
from fedflat.report.page.page import CLIENTS, Page, beside, named
from fedflat.report.page.run_groups import Group, Series, spread
from fedflat.runs.records import Record, first_measured, lead_of
from fedflat.words import amount, duration, percent

TITLES = {"loss": "Loss on the common test set", "train_loss": "Training loss"}
Spent = Callable[[Record], list[float]]
SHARES = (0.5, 0.8)  # of the way from the first accuracy to the best: targets that most runs reach


def curves(page: Page) -> Section:
    """Accuracy and loss over the rounds."""
    loss = first_measured(page.records, "loss", "train_loss")
    wanted = dict.fromkeys([page.metric, loss if page.metric != "loss" else "train_loss"])
    names = [name for name in wanted if any(record.points(name) for record in page.records)]
    plots = [_curves(page, name) for name in names]
    if max(record.rounds for record in page.records) >= LONG:
        plots += [page.second_half(len(page.plots) - len(names)) for _ in names]
    plots += [_curves(page, name) for name in further_metrics(page)]
    better = "" if page.metric == "loss" else f"{'Lower' if page.falls else 'Higher'} {page.what} and lower loss are "
    how = (
        f"{better or 'A lower loss is '}better. A line is the mean over the seeds; its band reaches from the lowest "
        "seed to the highest. Where a curve is smoothed, the faint line shows the values themselves. Drag over a chart "
        "to zoom; a double click shows all of it again."
    )
    title = "Loss" if page.metric == "loss" else f"{_title(page, page.metric).split(' on ')[0]} and loss"
    return Section("curves", title, how, [page.legend(), beside(*plots)], "Curves")


def _title(page: Page, name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    if name in CLIENTS:
        return f"Mean {written(lead_of(page.records))} of {CLIENTS[name]}"
    test = next((test for test in page.records[0].task.get("tests", ()) if name.startswith(f"{test}_")), "")
    return f"{titled(written(name.removeprefix(f'{test}_')))} on the {test or 'common'} test set"


def _curves(page: Page, name: str) -> Html:
    """A metric over the rounds."""
    series = [curve for group in page.groups if (curve := group.curve(name))]
    form = "percent" if page.records[0].is_share(name) else "number"
    title = _title(page, name)
    return page.over_rounds(title, series, {"form": form})


def targets(page: Page) -> Section | None:
    """Rounds to accuracies, of the mean curve and of each seed."""
    goals = chosen_targets(page) if page.form == "percent" and not page.falls else []
    if not goals:
        return None
    heads = ["method", *(percent(goal, 0) for goal in goals)]
    found = zip(page.groups, page.compared(goals).rows, strict=True)
    rows = [[named(group), *(_reached(page, group, row, goal) for goal in goals)] for group, row in found]
    how = (
        "The first round in which the mean curve reaches a value, and in brackets that of each seed. Fewer rounds mean "
        "less communication; a plus says that so many rounds were not enough."
    )
    body = [table(heads, rows, f"Rounds to a value of {page.what}", look="barred")]
    return Section("targets", "Rounds to a target", how, body, "Targets")


def chosen_targets(page: Page) -> list[float]:
    """Accuracies in whole per cent: two on the way up, the highest that all groups reach, the highest of any."""
    means = [points["y"] for group in page.groups if (points := _mean(page, group.records))]
    if not means:
        return []
    start, tops = max(mean[0] for mean in means), [max(mean) for mean in means]
    step = max(0.01, round_step((max(tops) - start) / 20)) if max(tops) > start else 0.01
    way = [math.floor((start + share * (max(tops) - start)) / step) * step for share in SHARES]
    ends = [math.floor(100 * top + 1e-9) / 100 for top in (min(tops), max(tops))]
    return sorted({round(goal, 2) for goal in (*way, *ends) if goal > 0})


def _mean(page: Page, records: Sequence[Record]) -> dict[str, list[float]]:
    return spread([record.points(page.metric) for record in records])


def _reached(page: Page, group: Group, row: Row, goal: float) -> Html:
    """The round of the mean curve, then of each seed, over a bar as long as the share of the rounds it takes."""
    mean, seeds = reached(goal, row)
    first, most = row[f"to_{goal:g}"], max(record.rounds for record in page.records)
    share = (first or min(row["rounds"])) / most
    return joined([tag("strong", mean), tag("span", seeds, class_="small"), bar(share, group.place, first is None)])


def bar(share: float, place: int, missed: bool = False) -> Html:
    """A thin bar in the colour of a group; hollow where nothing was reached."""
    fill = tag("i", class_=f"c{place % 7}" + (" missed" if missed else ""), style=f"width:{100 * share:.1f}%")
    return tag("span", fill, class_="bar", aria_hidden="true")


def costs(page: Page) -> Section:
    """What was sent and how long it took, and accuracy against both."""
    heads = [
        "method",
        "to each client per round",
        "from each client",
        "sent in all",
        "local steps",
        "time",
        "per round",
    ]
    rows = [[named(group), *_cost(group)] for group in page.groups]
    name = _title(page, page.metric).split(" on ")[0]
    drawn = [
        _against(page, f"{name} against numbers sent", "numbers sent, both ways", "amount", _sent),
        _against(page, f"{name} against time", "seconds of training and evaluation", "number", _seconds),
    ]
    how = (
        "The further to the left a curve rises, the less it costs to get there. What is counted are numbers, as a rule "
        "of four bytes each: the weights and whatever else the method sends, summed over the clients."
    )
    body = [table(heads, rows, "Cost of a run, mean over the seeds"), page.legend(), beside(*drawn)]
    return Section("costs", "Communication and time", how, body, "Cost")


def _cost(group: Group) -> list[str]:
    totals, rows = [record.cost() for record in group.records], [row for r in group.records for row in r.metrics]
    down, up = (fmean(row[name] for row in rows) for name in ("floats_down", "floats_up"))
    sent = fmean(total["floats_down"] + total["floats_up"] for total in totals)
    seconds, steps = (fmean(total[name] for total in totals) for name in ("seconds", "steps"))
    rounds = fmean(record.rounds for record in group.records)
    return [*map(amount, (down, up, sent, steps)), duration(seconds), f"{seconds / rounds:.3g} s"]


def _sent(record: Record) -> list[float]:
    """Numbers sent up to the end of each round."""
    rows = record.metrics
    down = (row["floats_down"] * (row["clients"] + row["left_out"]) for row in rows)
    up = (row["floats_up"] * row["clients"] for row in rows)
    return list(accumulate(a + b for a, b in zip(down, up, strict=True)))


def _seconds(record: Record) -> list[float]:
    return list(accumulate(row.get("seconds") or 0.0 for row in record.metrics))


def _against(page: Page, label: str, x: str, form: str, spent: Spent) -> Html:
    series = [one for group in page.groups if (one := _priced(page, group, spent))]
    return page.lines(label, series, {"label": x, "form": form}, {"form": page.form})


def _priced(page: Page, group: Group, spent: Spent) -> Series | None:
    """The accuracies of a group over the mean of what its runs had spent by each round."""
    curve = group.curve(page.metric)
    if curve is None:
        return None
    prices = [dict(zip((row["round"] for row in r.metrics), spent(r), strict=True)) for r in group.records]
    return curve | {"x": [fmean(price[x] for price in prices) for x in curve["x"]]}
