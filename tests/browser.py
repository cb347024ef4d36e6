"""A real browser without a window: chromium, spoken to in its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"Enter": 13, "ArrowLeft": 37}
PATIENCE = 120.0  # seconds for one answer, on a machine that is busy
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


def find_chromium() -> str | None:
    """The program, installed with apt where that is possible; None where it cannot be had.

    A lock keeps several processes of the tests from installing it at once.
    """
    with (Path(tempfile.gettempdir()) / "fedflat-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _installed() is None and os.geteuid() == 0 and shutil.which("apt-get"):
            command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
            subprocess.run(command, **quiet, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, timeout=600)  # type: ignore[call-overload]
    return _installed()


def _installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab. errors: what its console complained of, and every address it asked for besides files."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._number = write, read, b"", 0
        self.errors: list[str] = []
        self.loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.bringToFront")
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next(PATIENCE)).get("id") != self._number:
            self._hear(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            self._buffer += os.read(self._read, 1 << 20)
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def _hear(self, event: dict[str, Any]) -> None:
        """Note complaints and loads among the events."""
        name, values = event.get("method", ""), event.get("params", {})
        if name == "Page.loadEventFired":
            self.loaded += 1
        elif name == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif name == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(str(values["args"]))
        elif name == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif name == "Network.requestWillBeSent" and not values["request"]["url"].startswith(("file:", "data:")):
            self.errors.append(f"asked for {values['request']['url']}")

    def open(self, path: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file or an address in a window of this size."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path if isinstance(path, str) else path.absolute().as_uri())
        self.wait_for_load(self.loaded + 1)

    def wait_for_load(self, count: int) -> None:
        """Until so many pages have been loaded, and drawn."""
        deadline = time.monotonic() + PATIENCE
        while self.loaded < count:
            self._hear(self._next(deadline - time.monotonic()))
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Strike a key."""
        typed = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **typed)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled to the middle of the window."""
        there = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{there}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        found = self.evaluate(
            f"(({{ x, y, width, height }}) => [x, y, width, height])({there}.getBoundingClientRect())"
        )
        return tuple(found)  # type: ignore[return-value]

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move the mouse with its button pressed."""
        steps = [("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)]
        for kind, (x, y) in steps:
            pressed = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def double_click(self, x: float, y: float) -> None:
        """Click twice."""
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own and end it."""
    theirs, we_write = os.pipe()
    we_read, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [program, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = _started(words, theirs, answers)
        try:
            yield Browser(we_write, we_read)
        finally:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
            os.close(we_write)
            os.close(we_read)


def _started(words: list[str], theirs: int, answers: int) -> int:
    """The process, which reads commands from descriptor 3 and writes answers to 4."""
    apart = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, answers)]  # neither may be 3 or 4 before
    actions = [(os.POSIX_SPAWN_DUP2, apart[0], 3), (os.POSIX_SPAWN_DUP2, apart[1], 4)]
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    process = os.posix_spawn(words[0], words, os.environ, file_actions=[*actions, *quiet])
    for end in (theirs, answers, *apart):
        os.close(end)
    return process
