"""Rank every method under one set-up, each with hyper-parameters from the same small search.

FILE.toml says which settings, seeds and search; benchmarks/leaderboard.toml of the source is one. All methods that make
a common model take part, also those that you register. The same command continues after an interruption; finished runs
are kept, and a method that fails gets a row that says why. The page leaderboard.html can be sorted and filtered.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.cli.parser import Parser, add_data_root
from fedflat.specs import split

if TYPE_CHECKING:
    from fedflat.report.board.plan import Plan


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument(
        "file", metavar="FILE.toml", help="settings, seeds and search, such as benchmarks/leaderboard.toml"
    )
    about = "rank this method too, for example your own part; may be repeated (--import MODULE makes the part known)"
    parser.add_argument("--add", metavar="METHOD", action="append", default=[], help=about)
    parser.add_argument("--only", metavar="LIST", default="", help="rank only these methods and fedavg [all]")
    about = "run only this setting of the file; may be repeated [all]"
    parser.add_argument("--setting", metavar="NAME", action="append", default=[], help=about)
    parser.add_argument("--out", metavar="DIR", default="runs/leaderboard", help="folder for runs and page")
    add_data_root(parser)
    parser.add_argument("--list", action="store_true", help="list methods, values and the number of runs; run nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Run what is not finished, then print and write the table."""
    from fedflat.console import console, plain_table, say
    from fedflat.report.board.plan import load_plan

    plan = load_plan(arguments.file).within(arguments.setting)
    methods = plan.methods(arguments.add, [*split(arguments.only), *(arguments.add if arguments.only else [])])
    if arguments.list:
        return _list(plan, methods)
    from fedflat.cli.experiments import prepare
    from fedflat.report.board.page import HEADS, cells, rank_lines, write_board
    from fedflat.report.board.race import race
    from fedflat.report.board.standings import ranking, rows_of

    prepare([plan.setting(name) for name in plan.settings], arguments.data_root)
    entries = race(plan, methods, Path(arguments.out), arguments.data_root, say)
    rows, ranks = rows_of(entries), ranking(entries)
    table = [[text for text, _ in cells(row)] for row in rows]
    shown = [place for place, head in enumerate(HEADS) if head in SHOWN]
    console().print(plain_table(SHOWN, [[line[place] for place in shown] for line in table], numbers=(2, 3, 4)))
    say("\n".join(rank_lines(ranks)))
    say(f"written: {', '.join(map(str, write_board(plan.title, rows, ranks, Path(arguments.out))))}")
    return 1 if any(not entry.records for entry in entries) else 0


SHOWN = ("setting", "method", "accuracy", "against FedAvg", "time ÷ FedAvg", "note")


def _list(plan: Plan, methods: list[str]) -> int:
    from fedflat.console import console, plain_table, tell
    from fedflat.report.board.checks import rankable

    tried = {method: plan.variants(method) for method in methods}
    console().print(plain_table(("method", "tried as"), [(name, ", ".join(texts)) for name, texts in tried.items()]))
    tries = sum(len(plan.search["lr"]) + len(texts) - 1 for texts in tried.values())
    finals = len(methods) * plan.seeds
    out = {name: why for name in rankable() if (why := plan.why_not(name))}
    tell("\n".join(f"not ranked: {name}: {why}" for name, why in out.items()))
    settings = len(plan.settings)
    tell(
        f"{settings} settings: {settings * tries} runs of {plan.search['rounds']} rounds, {settings * finals} full runs"
    )
    return 0
