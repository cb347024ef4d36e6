"""Without a name: list the data sets and where they lie.

With a name: say where that one lies, fetch it, or show how it is divided among clients.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedflat.commands.parser import Parser, add_data_root
from fedflat.errors import DataError, InputError, UnknownNameError
from fedflat.experiment import Experiment, coerce

DIVISION = ("partition", "clients", "seed")


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a data set; see `fedflat list data`")
    parser.add_argument("--fetch", action="store_true", help="fetch it if it is not there yet")
    parser.add_argument("--show", action="store_true", help="show how it is divided, and write a picture of that")
    add_data_root(parser)
    division = parser.add_argument_group("with --show")
    for name, metavar in zip(DIVISION, ("TEXT", "N", "N"), strict=True):
        spec = Experiment.__dataclass_fields__[name]
        help = f"{spec.metadata['help']} [{spec.default}]"
        division.add_argument(f"--{name}", metavar=metavar, default=spec.default, help=help)
    division.add_argument("--out", metavar="FILE.png", help="where to write the picture")


def execute(arguments: argparse.Namespace) -> int:
    """Do what the options ask."""
    from fedflat.report.terminal import tell

    root = arguments.data_root
    if arguments.name is None:
        if arguments.fetch or arguments.show:
            raise InputError("which data set? fedflat data NAME --fetch")
        _list(root)
        return 0
    name = _checked(arguments.name)
    if arguments.fetch or arguments.show:
        fetch_shown(name, root)
    if arguments.show:
        _show(arguments)
    else:
        tell(_where(name, root))
    return 0


def _checked(text: str) -> str:
    """The name in `name` or `name(field=value)`."""
    from fedflat.calls import parse
    from fedflat.data import DATASETS

    name = parse(text).name
    if name not in DATASETS:
        raise UnknownNameError("data set", name, DATASETS)
    return name


def _list(root: str | None) -> None:
    from fedflat.data import DATASETS, SOURCES, data_root, locate
    from fedflat.report.terminal import console, plain_table, tell

    places = {name: str(locate(name, root) or "not here") for name in SOURCES} | {"digits": "embedded"}
    rows = [(name, places.get(name, "files of your own")) for name in sorted(DATASETS)]
    console().print(plain_table(("data", "where"), rows))
    tell(f"looked under {data_root(root)}; fetch one with `fedflat data NAME --fetch`")


def _where(name: str, root: str | None) -> str:
    from fedflat.data import SOURCES, data_root, locate

    if name not in SOURCES:
        return f"{name} is embedded" if name == "digits" else f"{name} reads files of your own; nothing to locate"
    found = locate(name, root)
    if found is None:
        raise DataError(f"{name} is not under {data_root(root)}; fetch it with `fedflat data {name} --fetch`")
    return str(found)


def fetch_shown(name: str, root: str | None) -> None:
    """Fetch a published data set that is not there yet, with a progress bar; leave every other name alone."""
    from fedflat.data import SOURCES, data_root, fetch, locate

    if name not in SOURCES or locate(name, root) is not None:
        return
    from fedflat.report.progress import download_bar
    from fedflat.report.terminal import say

    say(f"{name} is not under {data_root(root)} yet: fetching it")
    with download_bar(name) as progress:
        fetch(name, root, progress)


def _show(arguments: argparse.Namespace) -> None:
    from fedflat.data import load_federation
    from fedflat.data.picture import partition_figure
    from fedflat.naming import slug
    from fedflat.report.terminal import console, counts_map, counts_table, tell

    partition, clients, seed = (coerce(name, getattr(arguments, name)) for name in DIVISION)
    federation = load_federation(arguments.name, partition, clients, seed, arguments.data_root)
    counts, title = federation.counts(), f"{arguments.name}, {partition}, seed {seed}"
    facts = f"{len(counts)} clients, {counts.sum()} samples, {counts.shape[1]} classes"
    tell(f"{title}: {facts}")
    out = console()
    out.print(counts_table(counts), counts_map(counts, out.width), sep="\n")
    path = Path(arguments.out or f"{slug(arguments.name)}-{slug(partition)}-n{clients}-s{seed}.png")
    tell(f"picture: {partition_figure(counts, path, title)}")
