"""Search for good hyperparameters with optuna (pip install 'fedflat[sweep]'). For a grid use `fedflat run`.

A trial is an ordinary run; trials run one after another. --search takes a field, or an argument inside one, and the
distribution of its values: "lr=log(0.001,1)", "method.sam.rho=uniform(0,0.2)", "local_epochs=int(1,10)",
"batch_size=choice(16,32)". A trial that is worse than the median of the earlier ones is stopped early. The same command
continues an interrupted search; with a larger --trials it adds trials.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedflat.cli.experiments import add_experiment, experiments_of, prepare
from fedflat.cli.parser import Parser, add_data_root, add_metrics
from fedflat.errors import InputError
from fedflat.experiment import default_out, digest

if TYPE_CHECKING:
    from fedflat.runs.callbacks import Callback
    from fedflat.runs.search import Search


def configure(parser: Parser) -> None:
    """Add the options of the search and those that describe experiments."""
    parser.usage = "fedflat sweep [FILE.toml] [--preset NAME] [--field value …] --search NAME=LAW … [--trials N]"
    add = parser.add_argument
    add("--search", metavar="NAME=LAW", action="append", default=[], help="what to search; may be given several times")
    add("--trials", metavar="N", type=int, default=20, help="total number of trials [20]")
    about = "what to maximise; a loss is minimised [the leading metric of the data]"
    add("--metric", metavar="NAME", default="", help=about)
    add("--no-prune", action="store_true", help="do not stop bad trials early")
    add("--out", metavar="DIR", help="folder for the search and its runs [a new folder in runs/]")
    add_metrics(parser)
    add_data_root(parser)
    add_experiment(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Run the missing trials, and show a table of all."""
    from fedflat.console import console, plain_table, say

    search = _opened(arguments)
    _run_trials(search, arguments.trials, root=arguments.data_root, preset=arguments.preset, metrics=arguments.metrics)
    console().print(plain_table(*_table(search), numbers=range(1 + len(search.dimensions))))
    best = search.best()
    if best is None:
        say("no trial is complete")
        return 1
    file = search.out / "best.toml"
    file.write_text(best.to_toml(), encoding="utf-8")
    say(f"best: {file}; to run it with other seeds: fedflat run {file} --seed 1..3")
    return 0


def _opened(arguments: argparse.Namespace) -> Search:
    """Check the arguments and open the search in its folder."""
    from fedflat.runs.search import Dimension, Search
    from fedflat.runs.series import check

    experiments = experiments_of(arguments)
    if len(experiments) > 1:
        raise InputError("a search takes one value per field; write --search 'lr=choice(0.01,0.1)', or use fedflat run")
    dimensions = [Dimension.parse(text) for text in arguments.search]
    experiments = prepare(experiments, arguments.data_root)
    needed = [arguments.metric] if arguments.metric else []
    lead = check(experiments, arguments.data_root, needed, metrics=arguments.metrics)
    metric = arguments.metric or lead
    key = digest([metric, *map(str, dimensions)])
    out = arguments.out or f"runs/sweep-{default_out(experiments[0]).name}-{key}"
    return Search(experiments[0], dimensions, out, metric=metric, prune=not arguments.no_prune)


def _run_trials(search: Search, trials: int, **options: Any) -> None:
    """Run trials until there are `trials`; the options are those of `fedflat.run`."""
    from fedflat.runs.display import Board, Overall

    rounds, before = search.experiment.rounds, len(search.ended)
    with Board() as board:
        overall = Overall(board, [rounds] * (trials - before), before)

        def watchers(label: str) -> Sequence[Callback]:
            return [board.watch(f"{len(search.ended) + 1}/{trials} {label}", rounds), overall]

        while len(search.ended) < trials:
            search.step(watchers, **options)


def _table(search: Search) -> tuple[tuple[str, ...], list[list[str]]]:
    """One row per trial, the best first, and the failed ones last."""
    from fedflat.core.curves import falls

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
