"""Damaged run folders are looked at and gone on with: nothing unexpected, nothing lost, nothing silently wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import run_folders


def test_damaged_run_folders(tmp_path: Path) -> None:
    assert run_folders.folders(tmp_path, 40) == []


def test_terminal_escapes_in_a_strangers_run_are_written_out(tmp_path: Path) -> None:
    folder, _ = run_folders.make(tmp_path)
    toml = folder / "experiment.toml"
    toml.write_text(toml.read_text().replace('"scaffold"', '"scaffold\\u001b[2J"'))
    status, said = run_folders.command("show", str(folder))
    assert status == 2 and "\x1b" not in said and r"\x1b[2J" in said
    table = tmp_path / "part" / "metrics.jsonl"
    table.write_text(table.read_text().replace('"train_loss"', '"\\u001b[2Jloss"'))
    hidden = (tmp_path / "part").rename(tmp_path / "a\x1b[2Jb")
    for words in (["show", str(hidden)], ["compare", str(hidden)], ["show", f"{hidden}x"]):
        assert "\x1b" not in run_folders.command(*words)[1]


@pytest.mark.skipif(__import__("os").name == "nt", reason="Windows has other rights")
def test_a_folder_that_cannot_be_written_is_shown_and_reported_on(tmp_path: Path) -> None:
    folder, _ = run_folders.make(tmp_path)
    before = run_folders.contents(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert run_folders.looked_at(folder, tmp_path / "page.html") == []
        assert (tmp_path / "page.html").exists()
        words = ["analyze", str(folder), "--what", "rounds", "--out", str(tmp_path / "found")]
        status, said = run_folders.command(*words)
        assert status == 0, said
        assert list((tmp_path / "found").rglob("*.json")) and run_folders.contents(folder) == before
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
