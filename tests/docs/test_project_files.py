"""What is not run here is at least consistent: workflows, templates, container, citation, mutations."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
RECIPES = [*sorted((HOME / ".github").rglob("*.yml")), HOME / ".pre-commit-config.yaml", HOME / "CITATION.cff"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_what_workflows_make_is_in_the_makefile() -> None:
    rules = set(re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    wanted = [rule for path in RECIPES for rule in re.findall(r"\bmake ([\w-]+)$", path.read_text(), re.MULTILINE)]
    assert {"test", "test-engines", "docs", "dist"} <= set(wanted) <= rules
    started = json.loads((HOME / ".devcontainer" / "devcontainer.json").read_text())["postCreateCommand"]
    assert started == "make .venv/.dev" and "$(VENV)/.dev:" in (HOME / "Makefile").read_text()


def test_the_pythons_that_are_declared_are_those_that_a_workflow_tests() -> None:
    declared = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3" in line]
    matrix = re.search(r"python: (\[.*\])", (HOME / ".github" / "workflows" / "tests.yml").read_text())
    assert matrix is not None and json.loads(matrix[1]) == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_the_container_copies_what_is_there() -> None:
    lines = (HOME / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    ignored = (HOME / ".dockerignore").read_text().splitlines()
    assert "fedflat" in copied and all((HOME / name).exists() and name not in ignored for name in copied)


def test_the_citation_is_of_this_version() -> None:
    found = re.search(r"^version: \"?([\d.]+)\"?$", (HOME / "CITATION.cff").read_text(), re.MULTILINE)
    assert found is not None and found[1] == PROJECT["version"]


def test_every_mutation_finds_what_it_changes() -> None:
    """Without running them: `benchmarks/mutations.py` would refuse to start."""
    spec = importlib.util.spec_from_file_location("mutations", HOME / "benchmarks" / "mutations.py")
    assert spec is not None and spec.loader is not None
    mutations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutations)
    assert mutations.MUTATIONS and mutations.outdated() == []
