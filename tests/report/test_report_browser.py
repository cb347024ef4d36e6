"""The HTML report in a real browser: nothing is complained of, everything is drawn, and it can be worked with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, find_chromium
from report_worlds import analysed, three_runs

from fedflat.report.html import report, write
from fedflat.runs.records import records_of
from report.test_report import EVIL

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
EMPTY = (
    "[...document.querySelectorAll('[data-plot]')].filter(p => !p.querySelector('svg path, svg rect, canvas')).length"
)
INK = "getComputedStyle(document.body).color"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no chromium here, and it cannot be installed: that takes root, apt-get and a network")
    with browser(program) as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = three_runs(tmp_path_factory.mktemp("runs"))
    analysed(found)
    return found


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> Path:
    return report(runs, runs[0].parent / "report.html")


@pytest.fixture(autouse=True)
def no_complaints(tab: Browser) -> Iterator[None]:
    tab.errors.clear()
    yield
    assert tab.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_all_is_drawn_in_both_themes_and_nothing_overflows(tab: Browser, page: Path, width: int) -> None:
    colours = []
    for dark in (False, True):
        tab.open(page, width, dark=dark)
        assert tab.evaluate("document.querySelectorAll('[data-plot]').length") > 25
        assert tab.evaluate(EMPTY) == 0
        assert tab.evaluate(OVERFLOW) <= 0
        colours.append(tab.evaluate(INK))
    assert colours[0] != colours[1]


def test_hands_on_the_keyboard(tab: Browser, page: Path) -> None:
    tab.open(page)
    lines = "document.querySelectorAll('#curves path.line').length"
    before = tab.evaluate(lines)
    tab.evaluate("document.querySelector('#curves [data-key=g0]').focus()")
    tab.press("Enter")
    assert tab.evaluate(lines) == before / 2
    pressed = "[...document.querySelectorAll('[data-key=g0]')].map(b => b.ariaPressed)"
    assert set(tab.evaluate(pressed)) == {"false"}
    picture = "[...document.querySelectorAll('#eigenplane canvas.turn')].map(c => c.toDataURL())"
    still = tab.evaluate(picture)
    tab.evaluate("document.querySelector('#eigenplane canvas.turn').focus()")
    tab.press("ArrowLeft")
    assert all(a != b for a, b in zip(still, tab.evaluate(picture), strict=True))
    tab.evaluate("document.querySelector('#curves svg[tabindex]').focus()")
    tab.press("ArrowLeft")
    assert tab.evaluate("document.getElementById('tip').textContent").startswith("round 3\nsam: ")
    ink = tab.evaluate(INK)
    for _ in range(2):  # from the system's colours over light to dark ones
        tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate(INK) != ink
    tab.evaluate("localStorage.clear()")


def test_a_hostile_run_is_shown_and_does_nothing(tab: Browser, runs: list[Path], tmp_path: Path) -> None:
    own = tmp_path / EVIL.replace("/", "")
    shutil.copytree(runs[0], own)
    text = (own / "experiment.toml").read_text()
    (own / "experiment.toml").write_text(text.replace('method = "fedavg"', f'method = "{EVIL}"'))
    tab.open(report([own, *runs], tmp_path / "r.html", title=EVIL))
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in tab.evaluate("document.querySelector('#curves .legend').textContent")
    assert tab.evaluate("document.querySelector('h1').textContent") == EVIL


def test_a_page_that_loads_itself_again_keeps_its_place(tab: Browser, runs: list[Path], tmp_path: Path) -> None:
    path, hold = (
        write(records_of(runs), tmp_path / "r.html", reload=60),
        "window.setTimeout = f => { window.later = f }",
    )
    held = tab.call("Page.addScriptToEvaluateOnNewDocument", source=hold)
    tab.open(path)
    tab.call("Page.removeScriptToEvaluateOnNewDocument", **held)
    loads = tab.loaded
    tab.evaluate("(document.documentElement.style.scrollBehavior = 'auto', scrollTo(0, 1500))")
    tab.evaluate("document.querySelector('#curves [data-key=g1]').click()")
    write(records_of(runs), path)  # the runs have ended
    tab.evaluate("later()")
    tab.wait_for_load(loads + 1)
    assert tab.evaluate("new Promise(done => setTimeout(() => done(scrollY), 300))") == 1500
    assert tab.evaluate("document.querySelector('[data-key=g1]').ariaPressed") == "false"
    assert tab.evaluate("document.getElementById('live').hidden")


def test_it_prints(tab: Browser, page: Path) -> None:
    tab.open(page, dark=True)
    assert tab.pdf().startswith(b"%PDF-")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
