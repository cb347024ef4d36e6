"""Deploy an experiment with Flower: `fedflat deploy init DIR` writes a project that is ready to start.

Its fields come from a preset, a TOML file and options, as for `fedflat run`. See the README.md that it writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedflat.calls import split
from fedflat.commands.parser import Parser
from fedflat.commands.run import add_experiment, experiments_of
from fedflat.errors import InputError


def configure(parser: Parser) -> None:
    """Add what to do, where, and the experiment."""
    parser.usage = "fedflat deploy init DIR [FILE.toml] [--preset NAME] [--host HOST,…] [--field value …]"
    parser.add_argument("action", metavar="init", choices=["init"], help="write a project")
    parser.add_argument("folder", metavar="DIR", help="folder for it, new or empty")
    hosts = "names and addresses of the server, for its certificate [127.0.0.1,localhost]"
    parser.add_argument("--host", metavar="LIST", default="127.0.0.1,localhost", help=hosts)
    add_experiment(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Write the project and say where to go on."""
    from fedflat.assembly import check_spelling
    from fedflat.extras import needed
    from fedflat.report.terminal import say

    experiments = experiments_of(arguments)
    if len(experiments) != 1:
        raise InputError("a project is of one experiment: give every field one value")
    check_spelling(experiments[0])
    needed("flwr", "Flower", "flower")
    from fedflat.flower.project import write_project

    folder = Path(arguments.folder)
    write_project(folder, experiments[0], split(arguments.host))
    say(f"{folder} is ready: its README.md has the four commands. The keys in it are for trials only")
    return 0
