"""The report on a local web server, updated while runs go on. It only reads, and answers this machine by default."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedflat.errors import FedflatError, InputError
from fedflat.report.html import document
from fedflat.report.page.markup import escaped
from fedflat.report.watch import holds_runs, stamps
from fedflat.runs.records import records_of

SECONDS = 1.0  # between two looks at the files
NOBODY = "<!DOCTYPE html><title>fedflat</title><meta http-equiv=refresh content=2><p>{}</p>"


class LiveReport:
    """A report that is served over HTTP: `/` is the page, `/events` tells when files of the runs have changed.

    Args:
        runs: Run folders, or folders that contain them.
        host: Address to listen on. Any other than this machine's own needs the token of `url` in every request.
        port: 0 takes a free one.
        title: Title of the page.
    """

    def __init__(self, runs: Sequence[str | Path], host: str = "127.0.0.1", port: int = 8765, title: str = "") -> None:
        self.runs, self.title = runs, title
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(16)
        try:
            self.server = ThreadingHTTPServer((host, port), _handler(self))
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
        self.server.daemon_threads = True
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def page(self) -> str:
        """The page as it is now; a short one that loads itself again if no round has ended."""
        try:
            return document(records_of(run for run in self.runs if holds_runs(Path(run))), self.title, live=True)
        except FedflatError as error:
            return NOBODY.format(escaped(str(error)))

    def changes(self, send: Callable[[bytes], object]) -> None:
        """Send an event whenever a file of the runs has changed, and a comment in between, until sending fails."""
        seen = stamps(self.runs)
        while True:
            now = stamps(self.runs)
            send(b"data: changed\n\n" if now != seen else b": still here\n\n")
            seen = now
            time.sleep(SECONDS)

    def allows(self, query: str, host: str) -> bool:
        """Whether a request may be answered: by its token, or, on this machine, by the name it used for it."""
        if self.token:
            return hmac.compare_digest(parse_qs(query).get("token", [""])[0], self.token)
        name = urlsplit(f"//{host}").hostname or ""
        return _is_loopback(name)  # a page of another site that has a name for our address is refused

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            self.server.serve_forever()
        finally:
            self.server.server_close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _handler(live: LiveReport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET, and nothing else."""

        def do_GET(self) -> None:
            """Answer one request."""
            url = urlsplit(self.path)
            if not live.allows(url.query, self.headers.get("Host", "")):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif url.path == "/":
                self._send("text/html; charset=utf-8", live.page().encode())
            elif url.path == "/events":
                self._send("text/event-stream", b"")
                try:
                    live.changes(self._push)
                except OSError:
                    return  # the reader has gone
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _push(self, event: bytes) -> None:
            self.wfile.write(event)
            self.wfile.flush()

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            if body:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """Say nothing."""

    return Handler
