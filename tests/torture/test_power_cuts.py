"""The power may be cut at any moment: the run goes on and ends with the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torture.power import power_cuts


@pytest.mark.skipif(sys.platform != "linux", reason="the disk of these tests reads /proc")
def test_a_run_goes_on_after_power_cuts_with_the_same_bits(tmp_path: Path) -> None:
    assert power_cuts(tmp_path, 30) == []
