"""Measure what methods cost per client: operations, stored parameters, memory, time; as in table 5 of FedAlign's paper.

Operations and parameters are measured on real local steps. Rounds are timed on synthetic images, in turns.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from typing import Any

from fedflat.cli.parser import Parser
from fedflat.errors import InputError
from fedflat.experiment import Experiment

METHODS = "fedavg,fedprox,moon,mixup,stochdepth,gradaug,fedalign"
SETTINGS = Experiment(lr=0.01, lr_decay=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4, backend="serial")
CLIENTS = 2
ASKED = ("model", "methods", "device", "classes", "image", "batch_size", "samples", "rounds")  # in --json
PAPER = {  # MFLOPs, million parameters and seconds per round of ResNet-56 on CIFAR-100, table 5
    "fedavg": (87.3, 0.61, 137.2),
    "fedprox": (87.3, 1.21, 161.9),
    "moon": (262.2, 2.21, 414.2),
    "mixup": (87.3, 0.61, 137.8),
    "stochdepth": (82.4, 0.61, 136.7),
    "gradaug(n=1)": (133.9, 0.61, 229.2),
    "gradaug(n=2)": (170.7, 0.61, 323.9),
    "gradaug(n=3)": (217.4, 0.61, 417.7),
    "gradaug(n=4)": (264.1, 0.61, 514.4),
    "fedalign": (89.1, 0.61, 166.2),
}
Row = dict[str, Any]


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model", metavar="TEXT", default="resnet56", help="network; see `fedflat list models` [resnet56]"
    )
    parser.add_argument("--methods", metavar="LIST", default=METHODS, help=f"methods, separated by commas [{METHODS}]")
    parser.add_argument("--device", metavar="TEXT", default="auto", help="where rounds are timed: cpu, cuda, … [auto]")
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="number of rounds to time [3]")
    samples = f"samples per client in a timed round, with {CLIENTS} clients [128]"
    parser.add_argument("--samples", metavar="N", type=int, default=128, help=samples)
    parser.add_argument("--batch-size", metavar="N", type=int, default=64, help="samples in a minibatch [64]")
    parser.add_argument("--image", metavar="N", type=int, default=32, help="height and width of the images [32]")
    parser.add_argument("--classes", metavar="N", type=int, default=100, help="number of classes [100]")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    form.add_argument("--csv", action="store_true", help="print comma-separated values instead of the table")


def execute(arguments: argparse.Namespace) -> int:
    """Measure and print the costs."""
    _check(arguments)
    from fedflat.runs.folder import describe_environment

    experiments = _experiments(arguments)
    rows = measured(experiments, arguments)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name in ASKED}
        found = {"methods": rows, "settings": options, "environment": describe_environment()}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif arguments.csv:
        writer = csv.DictWriter(sys.stdout, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _show(rows, arguments, describe_environment())
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("rounds", 0), ("samples", 1), ("batch_size", 1), ("image", 1), ("classes", 2)):
        if getattr(arguments, name) < least:
            raise InputError(f"{name} must be at least {least}, not {getattr(arguments, name)}")


def _experiments(arguments: argparse.Namespace) -> dict[str, Experiment]:
    """Experiments by method. FedAvg is first, because the others are compared with it."""
    from fedflat.engine.assembly import check_spelling
    from fedflat.specs import split

    methods = dict.fromkeys(["fedavg", *split(arguments.methods)])
    settings = SETTINGS.replace(batch_size=arguments.batch_size, local_epochs=1, device=arguments.device)
    experiments = {m: settings.replace(method=m, model=with_options(arguments.model, m)) for m in methods}
    for experiment in experiments.values():
        check_spelling(experiment)
    return experiments


def with_options(model: str, method: str) -> str:
    """The model with the options that the method's parts need, if the model has them and the user did not set them."""
    import inspect

    from fedflat.core.method import Method
    from fedflat.models import MODELS
    from fedflat.specs import Call, parse

    call = parse(model)
    offered = inspect.signature(MODELS[call.name]).parameters if call.name in MODELS else {}
    wanted = {name: value for part in Method.parse(method).parts for name, value in part.model_options.items()}
    added = {name: value for name, value in wanted.items() if name in offered and name not in call.kwargs}
    return str(Call(call.name, call.args, {**call.kwargs, **added})) if added else model


def measured(experiments: dict[str, Experiment], arguments: argparse.Namespace) -> list[Row]:
    """Measure; one row per method. Writes the progress to stderr."""
    from fedflat.console import say
    from fedflat.cost import cost_of, in_turns
    from fedflat.cost.step import fewest_clients, synthetic
    from fedflat.words import amount

    shape, rounds = (3, arguments.image, arguments.image), arguments.rounds
    rows = []
    for method, experiment in experiments.items():
        cost = cost_of(experiment, shape, arguments.classes)
        say(f"{method}: {amount(cost.macs)} operations per sample")
        rows.append({"method": method, "model": experiment.model, **vars(cost)})
    if rounds:
        clients = max(CLIENTS, *map(fewest_clients, experiments.values()))
        federation = synthetic(shape, arguments.classes, clients, arguments.samples)
        times = in_turns(
            experiments,
            federation,
            rounds,
            lambda number, method, seconds: say(f"round {number}/{rounds}  {method}  {seconds:.2f} s"),
            range(CLIENTS),
        )
        for row in rows:
            row |= _timed(times[row["method"]], times["fedavg"])
    return [row | _papers(row["method"], arguments) for row in rows]


def _timed(seconds: list[float], base: list[float]) -> Row:
    """Mean and deviation of the seconds per round, and of their ratio to FedAvg's round in the same turn."""
    ratios = [own / other for own, other in zip(seconds, base, strict=True)]
    return {
        "seconds": statistics.mean(seconds),
        "seconds_std": _deviation(seconds),
        "ratio": statistics.mean(ratios),
        "ratio_std": _deviation(ratios),
    }


def _deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _papers(method: str, arguments: argparse.Namespace) -> Row:
    """The paper's values, if it has measured this method; None for networks and images other than the paper's."""
    from fedflat.core.method import Method
    from fedflat.core.part import Part

    names = ("paper_macs", "paper_weights", "paper_ratio")

    def own_parts(text: str) -> frozenset[Part]:
        return frozenset(part for part in Method.parse(text).parts if part.name != "fedavg")

    own, known = own_parts(method), {own_parts(text): text for text in PAPER}
    comparable = (arguments.model, arguments.image, arguments.classes) == ("resnet56", 32, 100)
    if not comparable or own not in known:
        return dict.fromkeys(names)
    macs, weights, seconds = PAPER[known[own]]
    return dict(zip(names, (macs * 1e6, weights * 1e6, seconds / PAPER["fedavg"][2]), strict=True))


def _show(rows: list[Row], arguments: argparse.Namespace, environment: dict[str, Any]) -> None:
    from fedflat.console import console, plain_table, tell

    heads = ("method", "MACs", "paper", "stored", "paper", "all", "memory", "s/round", "÷ fedavg", "paper")
    console().print(plain_table(heads, [_cells(row) for row in rows], numbers=range(1, len(heads))))
    tell("\n".join(_legend(rows, arguments, environment)))


def _cells(row: Row) -> list[str]:
    from fedflat.words import number

    def millions(value: float | None, digits: int) -> str:
        if value is None:
            return "–"
        text = f"{value / 1e6:.{digits}f}"
        return text if float(text) else number(value / 1e6)  # small networks have thousands

    def spread(name: str) -> str:
        deviation = row.get(f"{name}_std")
        mean = "–" if row.get(name) is None else f"{row[name]:.2f}"
        return mean if deviation is None else f"{mean} ± {deviation:.2f}"

    ratio = row["paper_ratio"]
    return [
        row["method"],
        *(millions(row["macs"], 1), millions(row["paper_macs"], 1)),
        *(millions(row["weights"], 2), millions(row["paper_weights"], 2), millions(row["parameters"], 2)),
        f"{number(row['memory'] / 1e6)} MB",
        *(spread("seconds"), spread("ratio"), "–" if ratio is None else f"{ratio:.2f}"),
    ]


def _legend(rows: list[Row], arguments: argparse.Namespace, environment: dict[str, Any]) -> list[str]:
    lines = [
        "MACs: millions per sample, of convolutions and linear layers in all forward passes of a later step (expected)",
        "stored: million parameters of convolutions and linear layers in all models that a client holds",
        "all: the same for all layers",
        f"memory: estimate for a batch of {arguments.batch_size}: these models, gradient, momentum, saved activations",
    ]
    if arguments.rounds:
        machine = f"{environment['processor']}, {environment['cores']} cores, torch {environment['torch']}"
        lines.append(
            f"s/round: {CLIENTS} clients with {arguments.samples} synthetic images each, one thread, "
            f"{arguments.rounds} rounds in turns after one that does not count; {machine}"
        )
    other = [row for row in rows if row["model"] != arguments.model]
    return lines + [f"{row['method']} uses the model {row['model']}" for row in other]
