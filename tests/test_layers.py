"""The layers of the package hold: imports point downwards, but for a few that are listed with their reason."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1]
spec: Any = importlib.util.spec_from_file_location("layers", HOME / "docs" / "layers.py")
layers: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layers)


def test_every_module_belongs_to_a_layer() -> None:
    assert all(layers.layer(name) >= 0 for name in layers.modules() if name not in layers.FACADE)


def test_imports_point_downwards_but_for_the_listed_ones() -> None:
    assert layers.upward() == set(layers.UPWARD)


def test_no_modules_import_each_other_and_the_graph_is_at_most_18_floors_deep() -> None:
    assert len(layers.floors()) <= 18, " → ".join(layers.floors())


def test_the_picture_is_that_of_the_import_graph() -> None:
    assert (HOME / "docs" / "images" / "layers.svg").read_text() == layers.draw(), "run python docs/layers.py"


def test_modules_and_functions_are_short() -> None:
    for name, path in layers.modules().items():
        text = path.read_text()
        assert text.count("\n") <= 400, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno <= 60, f"{name}.{node.name}"
