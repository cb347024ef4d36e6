"""The notebooks run from the first cell to the last, in a folder of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare-methods", "own-data", "own-method"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"notebook_{path.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "notebooks are kept without outputs"
            exec(compile("".join(cell["source"]), f"{path.name}[{cell['id']}]", "exec"), vars(module))


def test_a_kernel_shows_one_bar_per_run_and_one_table_per_comparison(tmp_path: Path) -> None:
    """In the kernel of a real notebook, without any option."""
    lines = (
        "import fedflat\n"
        "e = fedflat.Experiment(data='digits', model='mlp', clients=4, participation='uniform(2)', rounds=3)\n"
        "run = fedflat.run(e)",
        "fedflat.compare([run])",
        "fedflat.run(e, progress=False) and None",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in lines])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    bars, tables, none = (cell.outputs for cell in book.cells)
    assert len(bars) == 1 and '<progress value="3" max="3"' in bars[0].data["text/html"]
    assert bars[0].data["text/plain"].startswith("fedavg  3/3  accuracy 0.")
    assert len(tables) == 1 and tables[0].data["text/html"].count("<table>") == 1
    assert "fedavg" in tables[0].data["text/plain"] and none == []
