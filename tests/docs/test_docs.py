"""The documentation holds: its code runs, its commands are understood, its links lead somewhere, its examples work.

How to write a page of README.md or docs/**/*.md so that it is checked:

- a ```python block is run. All blocks of a page share a namespace and an empty folder, in order;
- a ```text block right after it is what it prints;
- the `fedflat …` lines of a ```console, ```sh or plain block must be understood; after `<!-- run -->` they are run;
- `<!-- file: NAME -->` before a block writes it into the folder, `<!-- needs: PACKAGE -->` leaves it out where that
  package is missing, and `<!-- not run: REASON -->` leaves it out always.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from fedflat import Experiment, analysis, register
from fedflat.cli import COMMANDS, main
from fedflat.cli.experiments import experiments_of
from fedflat.cli.parser import Parser, add_common
from fedflat.core.part import SINGLE_OWNER, SLOTS, fills
from fedflat.data import PARTITIONS
from fedflat.engine.assembly import check_spelling
from fedflat.experiment import CHOICES
from fedflat.parts import PARTS
from fedflat.parts.batchnorm import LocalBatchNorm, SiLoBN
from fedflat.parts.evaluated import AllClients, Selected
from fedflat.parts.observers import INTERFERENCE, OBSERVERS
from fedflat.runs.runner import run
from fedflat.studies.study import STUDIES

HOME = Path(__file__).resolve().parents[2]
DOCS, EXAMPLES = HOME / "docs", HOME / "examples"
PAGES = [HOME / "README.md", *sorted(DOCS.rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))

SHELL = ("", "console", "sh", "shell", "bash")
NOTE = re.compile(r"<!-- (run|not run|needs|file)(?:: (.+?))? -->")
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
PREAMBLES = {  # what a page takes for granted
    "README.md": """
import torch
from dataclasses import dataclass
from fedflat import Local, Part
from fedflat.core.fields import NonNegative

x, y = torch.randn(30, 4), torch.arange(30) % 3
(x0, x1, x2), (y0, y1, y2) = x.split(10), y.split(10)
my_module, my_loss = torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy
"""
}


@dataclass(frozen=True)
class Block:
    """A piece of code on a page. line: its first. output: it follows another directly. note, about: of the comment."""

    language: str
    text: str
    line: int
    output: bool = False
    note: str = ""
    about: str = ""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    lines, start, before = text.splitlines(), 0, "the top"
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("```"):
            if start:
                note = NOTE.fullmatch(before.strip())
                inside = "\n".join(lines[start : number - 1]) + "\n"
                language = lines[start - 1].strip().removeprefix("```")
                found.append(Block(language, inside, start + 1, not before, *(note.groups("") if note else ())))
            start, before = (0, "") if start else (number, before)
        elif not start and line.strip():
            before = line
    return found


def prose(text: str) -> str:
    """A page without its code, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(block: Block) -> Iterator[list[str]]:
    """The words after `fedflat` of every command in a block of the shell's."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("fedflat "):
            yield shlex.split(line, comments=True)[1:]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything happens in an empty folder, with no data set at hand, one thread, and a screen of 100 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("COLUMNS", "100")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- pages ----


@every_page
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(page.relative_to(HOME))
    module = ModuleType(re.sub(r"\W", "_", name))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their module up
    exec(PREAMBLES.get(name, ""), module.__dict__)
    found, left_out = blocks(page.read_text()), []
    for block, after in pairwise([*found, Block("", "", 0)]):
        if block.note == "file":
            Path(block.about).write_text(block.text)
        elif block.note == "needs" and importlib.util.find_spec(block.about) is None:
            left_out.append(f"line {block.line} needs {block.about}")
        elif block.language == "python" and block.note != "not run":
            printed = run_python(block, name, module)
            if after.language == "text" and after.output:
                assert printed == after.text, f"{name}, line {after.line}"
        elif block.language in SHELL and block.note == "run":
            run_commands(block, name)
    if left_out:
        pytest.skip(f"all ran but {'; '.join(left_out)}")


def run_python(block: Block, name: str, module: ModuleType) -> str:
    """What the block prints; a traceback shows the line of the page."""
    code = compile("\n" * (block.line - 1) + block.text, name, "exec")
    with redirect_stdout(io.StringIO()) as out:
        exec(code, module.__dict__)
    return out.getvalue()


def run_commands(block: Block, name: str) -> None:
    """Run every command as a shell would, which knows `runs/*`."""
    for words in commands(block):
        expanded = [w for word in words for w in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
        assert main(expanded) == 0, f"{name}, line {block.line}: fedflat {shlex.join(words)}"


@every_page
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    for block in blocks(page.read_text()):
        for words in commands(block) if block.language in SHELL else ():
            understand(words, names=block.note != "not run")


def understand(words: list[str], names: bool) -> None:
    """Raise what the command would about its words alone. names: of methods, data and so on, which must be known."""
    if words[0].startswith("-"):
        assert main(words) == 0
        return
    command = importlib.import_module(f"fedflat.cli.{COMMANDS[words[0]].module}")
    parser = Parser(prog="fedflat", description=None)
    command.configure(parser)
    add_common(parser)
    arguments = parser.parse([word for word in words[1:] if word != "--help"])
    if words[0] == "run" and arguments.file is None and names:
        for experiment in experiments_of(arguments):
            check_spelling(experiment)


@every_page
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(goal.read_text()), f"{target}: no such heading"


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page lead, within the project."""
    found = [first or second for first, second in LINK.findall(prose(page.read_text()))]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.M):
        plain = re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        if seen[slug]:
            seen[f"{slug}-{seen[slug]}"] = 0
    return set(seen)


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = set(), [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.is_dir():
            waiting += page.glob("*.md")
        elif page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            waiting += [(page.parent / target.partition("#")[0]).resolve() for target in links(page)]
    assert not sorted(str(page.relative_to(HOME)) for page in {*DOCS.rglob("*.md")} - reached)


# ---- what pages say of the code ----


def test_the_slots_and_who_fills_them_are_as_documented() -> None:
    hidden = (LocalBatchNorm, SiLoBN, Selected, AllClients)
    known = [part() for part in (*PARTS, *OBSERVERS.values(), *hidden)]
    _, slots, seen, *_ = (DOCS / "extending.md").read_text().split("\n## ")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \|$", slots, re.MULTILINE)
    said = {slot: (sorted(re.findall(r"`(\w+)`", who)), "**one owner**" in what) for slot, what, who in rows}
    true = {
        slot: (sorted(part.name for part in known if fills(part, slot)), slot in SINGLE_OWNER) for slot in sorted(SLOTS)
    }
    assert {slot: said.get(slot) for slot in true} == true
    moments = "".join(re.findall(r"^\| (`.+?) \|", seen, re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", moments)) == sorted(SLOTS)


def test_the_picture_of_a_round_has_every_slot() -> None:
    picture = ElementTree.parse(DOCS / "images" / "round.svg")
    drawn = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(SLOTS) <= drawn


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("analysis.md", [*STUDIES, *(name for name in analysis.__all__ if name.islower())]),
        ("how-to/command-line.md", [f"fedflat {name}" for name in COMMANDS]),
        ("how-to/command-line.md", [*OBSERVERS, INTERFERENCE]),
        ("how-to/batchnorm.md", CHOICES["batchnorm"]),
        ("concepts.md", CHOICES["evaluated"]),
        ("how-to/personal-methods.md", [part.name for part in PARTS if part.judged_by == "clients"]),
        ("faq.md", [name for name in PARTITIONS if "dirichlet" in name or name in ("lda_hsu", "pam")]),
    ],
)
def test_a_page_leaves_nothing_out(page: str, names: Iterable[str]) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b|analysis\.{name}\b", text)] == []


def test_every_file_of_a_run_folder_is_described(tmp_path: Path) -> None:
    settings = {"data": "digits", "model": "logistic", "clients": 4, "participation": "all", "rounds": 2}
    run(Experiment(method="scaffold", backend="serial", **settings), out=tmp_path / "run", progress=False)
    text = (DOCS / "how-to" / "run-folders.md").read_text()
    described = {name.replace("-N.", "-000002.").rstrip("/") for name in re.findall(r"^\| `([\w./-]+)`", text, re.M)}
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} <= described


# ---- examples ----


def python(*words: str | Path, **variables: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["own_model_and_data.py", "text.py", "lora.py"])
def test_an_example_says_what_came_out(name: str) -> None:
    assert "%" in python(EXAMPLES / name, "--rounds", "2")


def test_the_method_of_ones_own_is_found_by_its_entry_point(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copytree(EXAMPLES / "own_method", tmp_path / "source")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    python("-m", "pip", "install", *options, "--target", tmp_path / "site", tmp_path / "source")
    line = next(
        line for line in (EXAMPLES / "own_method" / "README.md").read_text().splitlines() if "fedflat run" in line
    )
    words = shlex.split(line)[1:]
    assert "scaffold+asam+swa" in words[words.index("--method") + 1].replace("(cycle=5)", "")
    words[words.index("--rounds") + 1] = "4"
    said = python("-m", "fedflat", *words, PYTHONPATH=str(tmp_path / "site"))
    assert "rounds" in said and "4 of 4" in said


def test_the_method_of_ones_own_does_what_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its null form changes no bit; and without weight decay the means of the channels stay where they began."""
    monkeypatch.syspath_prepend(EXAMPLES / "own_method")
    register(importlib.import_module("centralise").Centralise)
    settings = {"data": "digits", "model": "logistic", "clients": 4, "participation": "uniform(2)", "rounds": 2}
    still = Experiment(dtype="float64", weight_decay=0.0, clip=None, backend="serial", **settings)
    weights = {
        method: run(still.replace(method=method, lr=lr), progress=False).model[1].weight
        for method, lr in (
            ("scaffold+asam", 0.1),
            ("scaffold+asam+centralise(strength=0.0)", 0.1),
            ("scaffold+asam+centralise", 0.1),
            ("fedavg", 0.0),
        )
    }
    plain, null, centred, first = weights.values()
    assert torch.equal(plain, null)
    assert torch.allclose(centred.mean(1), first.mean(1), rtol=0, atol=1e-12)
    assert not torch.allclose(plain.mean(1), first.mean(1), rtol=0, atol=1e-4)
