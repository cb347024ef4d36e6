"""Messages of hostile clients are used or refused, and never break the server."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("flwr")
COUNT = int(os.environ.get("FUZZ_EXAMPLES", "300"))


def test_hostile_hellos() -> None:
    from fuzz import wire

    assert wire.hellos(COUNT) == []


def test_hostile_messages() -> None:
    from fuzz import wire

    content, expected, like = wire.good()
    assert wire.read_reply(content, wire.ASKED, expected, like).steps == 4
    assert wire.messages(COUNT) == []
