"""Deploy an experiment with Flower: `fedflat deploy init DIR` writes a Flower project, ready to start.

The fields of the experiment come from options, a TOML file and a preset, as for `fedflat run`. The README.md of the
project explains how to start it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedflat.cli.experiments import add_experiment, experiments_of
from fedflat.cli.parser import Parser
from fedflat.errors import InputError
from fedflat.specs import split

if TYPE_CHECKING:
    from fedflat.data import Federation
    from fedflat.experiment import Experiment


def configure(parser: Parser) -> None:
    """Add the action, the folder and the options that describe experiments."""
    parser.usage = "fedflat deploy init DIR [FILE.toml] [--preset NAME] [--host HOST,…] [--secagg] [--field value …]"
    parser.add_argument("action", metavar="init", choices=["init"], help="write a project")
    parser.add_argument("folder", metavar="DIR", help="folder of the project, new or empty")
    hosts = "names and addresses of the server, separated by commas, for its certificate [127.0.0.1,localhost]"
    parser.add_argument("--host", metavar="LIST", default="127.0.0.1,localhost", help=hosts)
    sums = "have clients mask their updates, so that the server learns sums only; for methods that need no more"
    parser.add_argument("--secagg", action="store_true", help=sums)
    add_experiment(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Write the project, and say how to continue."""
    from fedflat.console import say
    from fedflat.engine.assembly import check_spelling, settled
    from fedflat.extras import needed

    experiments = experiments_of(arguments)
    if len(experiments) != 1:
        raise InputError("a project has one experiment: give one value per field")
    check_spelling(experiments[0])
    experiment = settled(experiments[0])
    needed("flwr", "Flower", "flower")
    from fedflat.flower.project import write_project

    folder = Path(arguments.folder)
    write_project(folder, experiment, split(arguments.host), _federation(experiment), arguments.secagg)
    say(f"{folder} is ready: its README.md has the four commands. Use its keys for trials only")
    return 0


def _federation(e: Experiment) -> Federation | None:
    """The data that the experiment names, if they are on this machine."""
    from fedflat.console import say
    from fedflat.data import load_federation

    try:
        return load_federation(e.data, e.partition, e.clients, e.seed, None, e.augment, e.local_holdout)
    except InputError:
        say(f"{e.data} cannot be read here: add the clients' numbers of samples to clients.toml yourself")
        return None
