"""The power may be cut at any moment: the run goes on and ends with the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torture.image import hindrance, image_cuts
from torture.power import power_cuts


@pytest.mark.skipif(sys.platform != "linux", reason="the disk of these tests reads /proc")
def test_a_run_goes_on_after_power_cuts_with_the_same_bits(tmp_path: Path) -> None:
    assert power_cuts(tmp_path, 30) == []


def test_a_run_goes_on_from_copies_of_a_live_ext4_image(tmp_path: Path) -> None:
    if hindrance():
        pytest.skip(hindrance())
    assert image_cuts(tmp_path, 4) == []
