"""The live view: serves the report, tells of changes, answers nobody it should not, and writes nothing."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import network, plain, world

import fedflat
from fedflat.report import serve
from fedflat.report.serve import LiveReport


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveReport]:
    fedflat.run(plain(rounds=2), federation=world(), model=network(), out=tmp_path / "runs" / "one")
    server = LiveReport([tmp_path / "runs"], port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server
    server.server.shutdown()


def asked(live: LiveReport, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", live.server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_the_page_is_the_report_and_listens_for_changes(live: LiveReport) -> None:
    page = asked(live).read().decode()
    assert "fedavg on custom" in page and "connect-src 'self'" in page and '"live":true' in page


def test_only_reading_and_only_known_paths(live: LiveReport) -> None:
    assert asked(live, "/../etc/passwd").status == 404
    assert asked(live, "/", "POST").status == 501
    assert asked(live, "/", Host="evil.example").status == 403


def test_a_change_of_a_file_is_an_event(live: LiveReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SECONDS", 0.05)
    events = asked(live, "/events")
    assert events.getheader("Content-Type") == "text/event-stream" and events.fp.readline() == b": still here\n"
    (tmp_path / "runs" / "one" / "metrics.jsonl").open("a").close()
    file = tmp_path / "runs" / "one" / "clients.jsonl"
    file.write_text(file.read_text() + "\n")
    assert any(events.fp.readline() == b"data: changed\n" for _ in range(400))


def test_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    open_to_all = LiveReport([tmp_path], host="0.0.0.0", port=0)
    assert "?token=" in open_to_all.url and len(open_to_all.token) > 20
    assert not open_to_all.allows("", "127.0.0.1") and not open_to_all.allows("token=guess", "here")
    assert open_to_all.allows(f"token={open_to_all.token}", "anything")
    open_to_all.server.server_close()
