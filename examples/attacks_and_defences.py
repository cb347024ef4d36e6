"""Six of thirty clients are malicious: what is left of the accuracy, attack by attack and defence by defence.

    python examples/attacks_and_defences.py [--seeds 3] [--rounds 40] [--out runs/attacks] [--only REGEX] [--workers 1]

The digits are the embedded ones, so nothing is downloaded. Every run is written to a file as it ends; the same command
goes on where it was stopped, and prints the tables when all runs are there. A cell is the mean over the seeds, with the
half-width of the range; the backdoor has two tables, accuracy and success.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean

from fedflat import Experiment, run

MALICIOUS = 6
ATTACKS = {
    "none": "",
    "sign flip × 10": "sign_flip', scale=10.0",
    "label flip": "label_flip'",
    "ALIE 1.5": "alie', scale=1.5",
    "IPM 0.5": "ipm', scale=0.5",
    "IPM 5": "ipm', scale=5.0",
    "min-max": "min_max'",
    "min-sum": "min_sum'",
    "collusion × 5": "collude', scale=5.0",
    "size × 10": "size', scale=10.0",
    "backdoor": "backdoor', scale=2.0",
}
DEFENCES = (
    "fedavg",
    "median",
    "trimmed_mean(beta=0.2)",
    "krum(attackers=6)",
    "multikrum(attackers=6)",
    "geometric_median",
    "centred_clipping(quantile=0.5)",
    "norm_bound(quantile=0.5)",
    "fltrust",
    "bucketing(s=2)+median",
    "nnm(attackers=6)+trimmed_mean(beta=0.2)",
    "nnm(attackers=6)+multikrum(attackers=6)",
)
SETTING = Experiment(
    data="digits",
    partition="dirichlet_equal(delta=0.3)",
    clients=30,
    participation="all",
    model="mlp(hidden=32)",
    rounds=40,
    local_epochs=2,
    batch_size=32,
    lr=0.3,
    evaluate_every=0,
    evaluate_clients=None,
    backend="serial",
)


def method(defence: str, attack: str) -> str:
    """The method of a cell."""
    kind = ATTACKS[attack]
    return defence if not kind else f"{defence}+attack(kind='{kind}, clients={MALICIOUS})"


def results(path: Path) -> dict[tuple[str, str, int], dict[str, float]]:
    """What earlier calls have measured."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["defence"], row["attack"], row["seed"]): row for row in rows}


def measure(path: Path, setting: Experiment, seeds: int, only: str) -> dict[tuple[str, str, int], dict[str, float]]:
    """Run what is not there yet, and write each result as soon as it is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = results(path)
    wanted = [(d, a, s) for s in range(seeds) for a in ATTACKS for d in DEFENCES if re.search(only, f"{d} {a}")]
    todo = [cell for cell in wanted if cell not in known]
    for count, (defence, attack, seed) in enumerate(todo, 1):
        last = run(setting.replace(method=method(defence, attack), seed=seed), progress=False).metrics[-1]
        row = {"defence": defence, "attack": attack, "seed": seed, "accuracy": last["accuracy"]}
        row |= {"backdoor": last["backdoor"]} if "backdoor" in last else {}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{count}/{len(todo)} {defence}, {attack}, seed {seed}: {last['accuracy']:.3f}", file=sys.stderr)
    return results(path)


def cell(values: list[float]) -> str:
    """Mean and half of the range."""
    return f"{mean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}" if values else "–"


def table(known: dict[tuple[str, str, int], dict[str, float]], names: dict[str, str]) -> str:
    """A table of Markdown. names: title of a column → the attack, or `backdoor` for its success."""
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for defence in DEFENCES:
        cells = []
        for attack, quantity in names.items():
            rows = [row for (d, a, _), row in known.items() if d == defence and a == attack.removesuffix(", success")]
            cells.append(cell([row[quantity] for row in rows if quantity in row]))
        lines.append(f"| `{defence}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=SETTING.rounds)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--partition", default=SETTING.partition)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--only", default="", help="regular expression of `defence attack`")
    options = parser.parse_args()
    setting = SETTING.replace(rounds=options.rounds, partition=options.partition)
    known = measure(options.out / "results.jsonl", setting, options.seeds, options.only)
    names = list(ATTACKS)
    for columns in (names[:6], names[6:]):
        print(table(known, dict.fromkeys(columns, "accuracy")), end="\n\n")
    print(table(known, {"backdoor, success": "backdoor"}))


if __name__ == "__main__":
    main()
