"""Messages of hostile clients are used or refused, and never break the server."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")


def test_hostile_hellos() -> None:
    from fuzz import wire

    assert wire.hellos(300) == []


def test_hostile_messages() -> None:
    from fuzz import wire

    content, expected, like = wire.good()
    assert wire.read_reply(content, wire.ASKED, expected, like).steps == 4
    assert wire.messages(300) == []
