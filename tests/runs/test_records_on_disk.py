"""A run on disk: names that a power cut cannot take back, tables that are read once, systems without file locks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers import network, plain, run_python, world

import fedflat
from fedflat.runs import files, tables

WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
import fedflat
exp = fedflat.Experiment(data="digits", partition="iid", clients=2, model="logistic", participation="all", rounds=1,
                         backend="serial", workers=1)
print(fedflat.run(exp).status)
"""


def test_a_run_in_memory_needs_no_file_locks(tmp_path: Path) -> None:
    assert run_python(WITHOUT_FCNTL).strip() == "finished"


def test_a_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    files.write_atomically(tmp_path / "folder" / "file", b"content")
    assert synced[-1] == "folder" and synced[0].startswith(".file.")


def test_tables_are_parsed_again_only_when_they_have_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fedflat.run(plain(rounds=3), federation=world(), model=network(), out=tmp_path / "run")
    read: list[Path] = []
    real: Any = tables.read_rows
    monkeypatch.setattr(tables, "read_rows", lambda path: read.append(path) or real(path))
    first = run.clients
    assert [run.clients for _ in range(5)] == [first] * 5
    assert len(read) <= 1
    first.clear()  # the caller's own list
    assert run.clients
