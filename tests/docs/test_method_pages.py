"""docs/methods tells the truth: every part has its page, and the figures on it are those of the code and of runs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedflat
from fedflat import Experiment, Federation, Local, Part
from fedflat.core.method import Method
from fedflat.core.part import SINGLE_OWNER, SLOTS, fills
from fedflat.errors import InputError
from fedflat.models.layers import norm_layer
from fedflat.models.resnet import ResNet
from fedflat.models.simple import mlp
from fedflat.parts import PARTS
from fedflat.parts.named_sums import SUMS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "methods"
every_part = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)


def page(part: type[Part]) -> str:
    return (PAGES / f"{part.name}.md").read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of its level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def index() -> dict[str, list[str]]:
    """The index's row of every part: slots, down / up, client, server, passes."""
    found = [row for row in rows(section((PAGES / "README.md").read_text(), "All parts")) if row[0] != "part"]
    return {re.sub(r"\[(\w+)\]\(\1\.md\)", r"\1", name): rest for name, *rest in found}


# ---- pages and code ----


def test_the_index_lists_every_part_once_and_every_page_is_a_parts() -> None:
    names = sorted(part.name for part in PARTS)
    assert sorted(index()) == names
    assert sorted(path.stem for path in PAGES.glob("*.md") if path.name != "README.md") == names


@every_part
def test_a_part_has_a_short_formula(part: type[Part]) -> None:
    lines = part.formula.splitlines()
    assert 1 <= len(lines) <= 3 and all(line == line.strip() and 0 < len(line) <= 110 for line in lines)


@every_part
def test_every_field_stands_on_the_page_with_its_default(part: type[Part]) -> None:
    table = [row for row in rows(section(page(part), "Fields")) if row[0] != "field"]
    told = {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, *_ in table}
    assert told == {spec.name: spec.default for spec in fields(part)}


@every_part
def test_the_index_names_the_slots_that_a_part_fills(part: type[Part]) -> None:
    unsaid = ("check", "client_metrics")
    assert re.findall(r"`(\w+)`", index()[part.name][0]) == [
        slot for slot in SLOTS if fills(part(), slot) and slot not in unsaid
    ]


def refused(left: type[Part], right: type[Part]) -> bool:
    try:
        Method([left(), right()])
    except InputError:
        return True
    return False


@every_part
def test_a_page_says_exactly_what_its_part_cannot_be_combined_with(part: type[Part]) -> None:
    _, well, not_at_all = section(page(part), "Combinations").split("**C")
    others = {other.name for other in PARTS if other is not part and refused(part, other)}
    assert set(re.findall(r"`(\w+)`", not_at_all)) == others
    assert others.isdisjoint(re.findall(r"`(\w+)`", well))


def test_the_index_says_who_claims_the_slots_of_one_owner() -> None:
    text = section((PAGES / "README.md").read_text(), "What cannot be combined")
    claims = {slot.strip("`"): (what, re.findall(r"`(\w+)`", names)) for slot, what, names in rows(text)[1:]}
    for slot, what in SINGLE_OWNER.items():
        assert claims.pop(slot) == (what, [part.name for part in PARTS if fills(part(), slot)])
    assert not claims
    needy = [f"`{part.name}`" for part in PARTS if part.needs_mean]
    assert ", ".join(needy) in " ".join(text.split())


@every_part
def test_figures_of_speed_and_accuracy_are_those_of_the_measured_tables(part: type[Part]) -> None:
    measured = set(re.findall(r"\d+\.\d+", (DOCS / "results.md").read_text() + (DOCS / "performance.md").read_text()))
    told = section(page(part), "Cost") + section(page(part), "Our results beside the paper's")
    told, *_ = told.split("**Under equal conditions**")  # those are tested below
    assert set(re.findall(r"\d+\.\d+", told)) <= measured


# ---- pages and runs ----

EPOCHS, BATCH, SAMPLES, CLIENTS = 2, 4, 8, 5
SMALL = {"cutout": "cutout(size=4)", "gradaug": "gradaug(resolutions=(8, 6))"}  # the images have 8×8 pixels
RESIDUAL = ("fedalign", "gradaug", "stochdepth")
passes = 0


@dataclass(frozen=True)
class CountPasses(Part):
    """Records how many forward passes of the whole network a client makes for gradients."""

    def build(self, module: nn.Module) -> nn.Module:
        module.register_forward_pre_hook(self._count)
        return module

    def _count(self, *_: object) -> None:
        global passes
        passes += torch.is_grad_enabled()

    def begin(self, local: Local) -> None:
        local.scratch(self)["before"] = passes

    def client_metrics(self, setup: Any, local: Local, samples: Any) -> Mapping[str, float]:
        return {"passes": passes - local.scratch(self)["before"]}


fedflat.register(CountPasses)


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return noise, torch.arange(SAMPLES) % 4


def network(part: type[Part]) -> nn.Module:
    torch.manual_seed(0)
    if part.name in RESIDUAL:
        return ResNet(1, 4, (1, 1), norm=norm_layer("tests", "none"), width=8)
    return mlp((1, 8, 8), 4, hidden=(6, 6, 6, 6))


def measured(part: type[Part], model: nn.Module) -> fedflat.Run:
    experiment = Experiment(
        method=f"{SMALL.get(part.name, part.name)}+countpasses",
        participation="all",
        rounds=2,
        local_epochs=EPOCHS,
        batch_size=BATCH,
        lr=0.01,
        momentum=0.5,
        backend="serial",
    )
    data = [images(seed) for seed in range(CLIENTS)]
    federation = Federation(data, test=images(9), client_tests=data)
    return fedflat.run(experiment, federation=federation, model=model, progress=False)


def worth(cell: str, units: dict[str, float]) -> float:
    """A cell such as `1 + 2/d`, `1 − 1/K`, `head` or `2 network` as a number."""
    total = 0.0
    for term in cell.replace(" − ", " + −").split(" + "):
        found = re.fullmatch(r"(−?)(\d*) ?(/?)(\w*)", term)
        assert found, cell
        number, unit = float(found[2] or 1), units[found[4]]
        total += (-1 if found[1] else 1) * (number / unit if found[3] else number * unit)
    return total


def floats(states: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() for state in states.values() for tensor in state.values())


@every_part
def test_messages_state_and_passes_are_those_of_a_run(part: type[Part]) -> None:
    model = network(part)
    run, size = measured(part, model), sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for p in [m for m in model.modules() if isinstance(m, nn.Linear)][-1].parameters()) / size
    server = {name: state for name, state in run.server_state.items() if name == part.name}
    units = {"": 1.0, "d": size, "E": EPOCHS, "K": EPOCHS * SAMPLES // BATCH, "head": head, "body": 1 - head}
    units["network"] = server.get(part.name, {}).get("phi", torch.empty(0)).numel() / size
    messages, client_keeps, server_keeps, extra = index()[part.name][1:]
    down, up = messages.split(" / ")
    last = run.metrics[-1]
    assert last["floats_down"] / size == pytest.approx(worth(down, units))
    assert last["floats_up"] / size == pytest.approx(worth(up, units))
    assert floats(run.client_state(0)) / size == pytest.approx(worth(client_keeps, units))
    assert floats(server) / size == pytest.approx(worth(server_keeps, units))
    made = {row["passes"] / (EPOCHS * SAMPLES // BATCH) for row in run.clients}
    assert made == {1 + worth(extra, units)}


@every_part
def test_a_page_has_the_costs_of_the_index(part: type[Part]) -> None:
    assert rows(section(page(part), "Cost"))[1] == index()[part.name][1:]


@every_part
def test_a_page_has_the_figures_of_the_leaderboard(part: type[Part]) -> None:
    """All finished runs of the part by itself; no page says that there are none where there are."""
    told = " ".join(section(page(part), "Our results beside the paper's").split())
    own = ranked(part.name)
    assert_tells(told, own)
    assert bool(own) == ("Under equal conditions" in told) and not (own and "No run with it" in told)


@pytest.mark.parametrize("name", SUMS)
def test_the_index_has_the_figures_of_named_sums(name: str) -> None:
    """The names themselves and their figures, as the leaderboard has them."""
    text = section((PAGES / "README.md").read_text(), "Names of sums")
    assert any(cells[0].startswith(f"`{name}(") for cells in rows(text))
    lines, own = [line for line in text.split("\n- ") if line.startswith(f"`{name}`:")], ranked(name)
    assert len(lines) == bool(own)
    assert_tells(" ".join(lines and lines[0].split()), own)
    assert ("Under equal conditions" in text) == any(map(ranked, SUMS))


def ranked(name: str) -> list[dict[str, Any]]:
    """The finished runs of a part by itself, or of a named sum, one row per setting of the leaderboard."""
    board = json.loads((DOCS / "evidence" / "leaderboard.json").read_text())["rows"]
    return [row for row in board if row["seeds"] and re.fullmatch(rf"{name}(\(.*\))?", row["method"])]


def assert_tells(told: str, own: list[dict[str, Any]]) -> None:
    """All their figures, and those of no other setting."""
    for row in own:
        assert f"{row['setting']}, `{row['chosen']}`: {100 * row['accuracy']:.2f} ± {100 * row['std']:.2f} %" in told
        assert f"λ max {row['lambda_max']:.3g}" in told and f"trace {row['trace']:.3g}" in told
    assert told.count("of the first seed's model") == len(own)
