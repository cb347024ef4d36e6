"""Search for good values: trials are ordinary runs that share all but what is searched, one after another.

--search takes a field, or an argument in one, and a law: "lr=log(0.001,1)", "method.sam.rho=uniform(0,0.2)",
"local_epochs=int(1,10)", "batch_size=choice(16,32)". Trials that are worse than half of the earlier ones are stopped
early. Running the same command again goes on; a larger --trials adds to what is there. Needs optuna: pip install
'fedflat[sweep]'. For a grid use `fedflat run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedflat.commands.parser import Parser, add_data_root
from fedflat.commands.run import add_experiment, experiments_of, prepare
from fedflat.errors import InputError
from fedflat.naming import default_out, digest

if TYPE_CHECKING:
    from fedflat.callbacks import Callback
    from fedflat.search import Search


def configure(parser: Parser) -> None:
    """Add the options of the search, and those of `fedflat run`."""
    parser.usage = "fedflat sweep [FILE.toml] [--preset NAME] [--field value …] --search NAME=LAW … [--trials N]"
    add = parser.add_argument
    add("--search", metavar="NAME=LAW", action="append", default=[], help="what to search; may be given several times")
    add("--trials", metavar="N", type=int, default=20, help="how many trials there are to be in all [20]")
    add("--metric", metavar="NAME", default="accuracy", help="what is to be high, or low if it is a loss [accuracy]")
    add("--no-prune", action="store_true", help="run every trial to its end")
    add("--out", metavar="DIR", help="folder of the trials' runs; under runs/ by default")
    add_data_root(parser)
    add_experiment(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Run the trials that are missing, and show all."""
    from fedflat.report.terminal import console, plain_table, say

    search = _opened(arguments)
    _run_trials(search, arguments.trials, root=arguments.data_root, preset=arguments.preset)
    console().print(plain_table(*_table(search), numbers=range(1 + len(search.dimensions))))
    best = search.best()
    if best is None:
        say("no trial was complete")
        return 1
    file = search.out / "best.toml"
    file.write_text(best.to_toml(), encoding="utf-8")
    say(f"best: {file}; on other seeds: fedflat run {file} --seed 1..3")
    return 0


def _opened(arguments: argparse.Namespace) -> Search:
    """The search that the arguments describe, checked, in its folder."""
    from fedflat.search import Dimension, Search
    from fedflat.series import check

    experiments = experiments_of(arguments)
    if len(experiments) > 1:
        raise InputError("a search takes one value a field; write --search 'lr=choice(0.01, 0.1)', or use fedflat run")
    dimensions = [Dimension.parse(text) for text in arguments.search]
    prepare(experiments, arguments.data_root)
    check(experiments, arguments.data_root)
    key = digest([arguments.metric, *map(str, dimensions)])
    out = arguments.out or f"runs/sweep-{default_out(experiments[0]).name}-{key}"
    return Search(experiments[0], dimensions, out, metric=arguments.metric, prune=not arguments.no_prune)


def _run_trials(search: Search, trials: int, **options: Any) -> None:
    """Go on until there are so many trials. Further options are those of `fedflat.run`."""
    from fedflat.report.progress import Board, Overall

    rounds, before = search.experiment.rounds, len(search.ended)
    with Board() as board:
        overall = Overall(board, [rounds] * (trials - before), before)

        def watchers(label: str) -> Sequence[Callback]:
            return [board.watch(f"{len(search.ended) + 1}/{trials} {label}", rounds), overall]

        while len(search.ended) < trials:
            search.step(watchers, **options)


def _table(search: Search) -> tuple[tuple[str, ...], list[list[str]]]:
    """One row a trial, the best first and the failed last."""
    from fedflat.callbacks import falls

    names = [dimension.name for dimension in search.dimensions]
    sign = 1 if falls(search.metric) else -1
    trials = sorted(search.ended, key=lambda t: (t.value is None, sign * (t.value or 0.0)))
    rows = [[_shown(t.value), *(_shown(t.params[n]) for n in names), _end(t), t.user_attrs["folder"]] for t in trials]
    return (search.metric, *names, "end", "folder"), rows


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _end(trial: Any) -> str:
    failure = trial.user_attrs.get("failure")
    return f"failed: {failure}" if failure else str(trial.state.name).lower()
