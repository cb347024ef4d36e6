"""What the pages say of all parts at once, written from the code; tests/docs checks that it is up to date.

    python docs/method_tables.py        after a part was added, or fills other slots, or the leaderboard has new figures

Rewrites the paragraph *Cannot be combined with* of every page of docs/methods and what docs/evidence/leaderboard.json
says of its part; in the README there what it says of the named sums, and the table of slots with one owner; and who
fills each slot in docs/extending.md. It changes nothing else.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.core.method import Method
from fedflat.core.part import SINGLE_OWNER, SLOTS, Part, fills
from fedflat.errors import InputError
from fedflat.parts import PARTS
from fedflat.parts.batchnorm import LocalBatchNorm, SiLoBN
from fedflat.parts.evaluated import AllClients, Selected
from fedflat.parts.named_sums import SUMS
from fedflat.parts.observers import OBSERVERS

DOCS = Path(__file__).parent
ROW = r"^\| `{}` \| ([^|\n]*) \| [^|\n]* \|$"
EVERYBODY = (*PARTS, *OBSERVERS.values(), LocalBatchNorm, SiLoBN, Selected, AllClients)


def reason(part: type[Part], other: type[Part]) -> str | None:
    """Why two parts cannot be combined, as the page of the first says it; None if they can."""
    try:
        Method([part(), other()])
    except InputError as error:
        why = str(error).split("cannot be combined: ")[1]
        if "plain mean" not in why:
            return why.replace(repr(other.name), "the other").replace(repr(part.name), "this part")
        mine = part.needs_mean and (fills(other(), "combine") or other.replaces_mean)
        return f"they {'replace the plain mean that this server step needs' if mine else MEAN}"
    return None


MEAN = "have server steps that need the plain mean, which this part replaces"


def cannot(part: type[Part]) -> str:
    """The last paragraph of a part's page."""
    found: dict[str, list[str]] = {}
    for other in PARTS:
        why = reason(part, other) if other is not part else None
        if why:
            found.setdefault(why, []).append(f"`{other.name}`")
    if not found:
        return "**Cannot be combined with**: nothing; it claims no slot that has a single owner."
    told = "; ".join(f"{', '.join(names)} ({why})" for why, names in found.items())
    return filled(f"**Cannot be combined with** {told}.")


def measured(name: str, rows: list[Mapping[str, Any]]) -> str:
    """What the leaderboard's finished settings say of a part or of a named sum; empty if nothing."""
    told = []
    for row in rows:
        first = next(r for r in rows if (r["setting"], r["method"]) == (row["setting"], "fedavg"))
        if row["method"].split("(")[0] != name or "+" in row["method"] or not row["seeds"]:
            continue
        alone = row is first
        accuracy = f"{row['setting']}, `{row['chosen']}`: {score(row)} %" + ("" if alone else f" ({score(first)})")
        test = "" if alone else f", p {shown(row['p'])}, with Holm's correction {shown(row['p_holm'])}"
        figures = (("λ max", "lambda_max"), ("λ₁/λ₅", "ratio5"), ("trace", "trace"))
        flat = [f"{n} {row[k]:.3g}" + ("" if alone else f" ({first[k]:.3g})") for n, k in figures]
        told.append(f"{accuracy}{test}; of the first seed's model {', '.join(flat)}")
    return f"{'. '.join(told)}." if told else ""


def of_a_part(part: type[Part], rows: list[Mapping[str, Any]]) -> str:
    """The paragraph of a part's page, beside FedAvg in brackets; empty if there are no runs."""
    beside = "" if part.name == "fedavg" else ", FedAvg in brackets"
    told = measured(part.name, rows)
    return (
        filled(f"**Under equal conditions** ([leaderboard](../leaderboard.md); three seeds{beside}): {told}")
        if told
        else ""
    )


def of_the_sums(rows: list[Mapping[str, Any]]) -> str:
    """The list of the README, one line per named sum of which there are runs."""
    told = {name: measured(name, rows) for name in SUMS}
    lines = [filled(f"- `{name}`: {figures}", indent="  ") for name, figures in told.items() if figures]
    head = "**Under equal conditions** ([leaderboard](../leaderboard.md); three seeds, FedAvg in brackets):"
    return "\n".join([head, "", *lines]) if lines else ""


def filled(text: str, indent: str = "") -> str:
    """The text in lines of 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def score(row: Mapping[str, Any]) -> str:
    """Accuracy in percent, with its deviation over the seeds."""
    return f"{100 * row['accuracy']:.2f} ± {100 * row['std']:.2f}"


def shown(p: float) -> str:
    """A p-value, with the sign before it."""
    return "< 0.001" if p < 0.0005 else f"= {p:.3f}"


NOTHING = r"^No run with it is among those of \[results\]\(\.\./results\.md\)\.$"
FIGURES = rf"{NOTHING}|^\*\*Under equal conditions\*\*(?:.|\n)*?(?=\n\n)|(?=^## Example$)"
"""Where a page tells of runs: nothing so far, figures of an earlier leaderboard, or the end of that section."""
OF_SUMS = r"(?:^\*\*Under equal conditions\*\*(?:.|\n)*?)?(?=^## What cannot be combined$)"
"""The same in the README: figures of an earlier leaderboard, or the end of the section about names of sums."""


def rewrite(path: Path, pattern: str, text: str) -> None:
    """Put `text` where the pattern matches, once."""
    old = path.read_text()
    new, count = re.subn(pattern, lambda _: text, old, count=1, flags=re.DOTALL | re.MULTILINE)
    if not count:
        raise SystemExit(f"{path}: nothing matches {pattern!r}")
    if new != old:
        path.write_text(new)


def main() -> None:
    """Rewrite the pages."""
    index, extending = DOCS / "methods" / "README.md", DOCS / "extending.md"
    board = json.loads((DOCS / "evidence" / "leaderboard.json").read_text())["rows"]
    for part in PARTS:
        page = DOCS / "methods" / f"{part.name}.md"
        rewrite(page, r"\*\*Cannot be combined with\*\*.*\Z", cannot(part) + "\n")
        if figures := of_a_part(part, board):
            fresh = not re.search(FIGURES.rpartition("|")[0], page.read_text(), re.MULTILINE)
            rewrite(page, FIGURES, figures + ("\n\n" if fresh else ""))
    if figures := of_the_sums(board):
        rewrite(index, OF_SUMS, f"{figures}\n\n")
    for slot, what in SINGLE_OWNER.items():
        names = ", ".join(f"`{part.name}`" for part in PARTS if fills(part(), slot))
        rewrite(index, ROW.format(slot), row(slot, what, names))
    needy = ", ".join(f"`{part.name}`" for part in PARTS if part.needs_mean)
    rewrite(index, r"the server steps of `.*? hold for", f"the server steps of {needy} hold for")
    for slot in SLOTS:
        said = re.search(ROW.format(slot), extending.read_text(), re.MULTILINE)
        if said is None:
            raise SystemExit(f"docs/extending.md does not say what `{slot}` does")
        names = " ".join(f"`{part.name}`" for part in EVERYBODY if fills(part(), slot))
        rewrite(extending, ROW.format(slot), row(slot, said[1], names))


def row(*cells: str) -> str:
    """A row of a table, the first cell as code."""
    return f"| `{cells[0]}` | {' | '.join(cells[1:])} |"


if __name__ == "__main__":
    main()
