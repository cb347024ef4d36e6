"""The HTML report in a real browser: nothing is complained of, everything is drawn, and it can be worked with."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import Browser, browser, find_chromium
from PIL import Image
from report_worlds import analysed, experiment, three_runs

from fedflat.report import serve
from fedflat.report.html import report, write
from fedflat.runs.records import Record, records_of
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


SPLIT = """(() => {  // words of heads whose letters are not all in one line
  const found = [], range = document.createRange();
  for (const head of document.querySelectorAll("h1, h2, h3, th, dt, figcaption, summary, .links a")) {
    const walker = document.createTreeWalker(head, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\p{L}+/gu)) {
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
    }
  }
  return found;
})()"""


@pytest.mark.parametrize("width", [1280, 1000, 768, 600, 360, 320])
def test_no_head_breaks_within_a_word(tab: Browser, page: Path, width: int) -> None:
    tab.open(page, width)
    tab.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
    assert tab.evaluate(SPLIT) == []
    assert tab.evaluate(OVERFLOW) <= 0


CHART = "#curves svg[tabindex]"


def test_dragging_zooms_and_a_double_click_shows_all_again(tab: Browser, page: Path) -> None:
    tab.open(page)
    left, top, width, height = tab.box(CHART)
    first = (
        f"[...document.querySelector('{CHART}').querySelectorAll('text[text-anchor=middle]')].map(t => +t.innerHTML)"
    )
    whole = tab.evaluate(first)
    assert (min(whole), max(whole)) == (1, 4)
    tab.drag((left + 0.75 * width, top + 0.5 * height), (left + 0.95 * width, top + 0.5 * height))
    assert min(tab.evaluate(first)) > 2
    assert not tab.evaluate("document.querySelector('#curves .tool').hidden")
    tab.double_click(left + 0.5 * width, top + 0.5 * height)
    assert tab.evaluate(first) == whole


def test_smoothing_averages_the_values_and_keeps_them_in_sight(tab: Browser, tmp_path: Path) -> None:
    row = {"clients": 1, "left_out": 0, "steps": 1, "floats_up": 1, "floats_down": 1, "seconds": 1.0}
    zigzag = [
        row | {"round": t, "accuracy": 0.5 + 0.1 * (-1) ** t, "loss": 1.0, "train_loss": 1.0} for t in range(1, 31)
    ]
    tab.open(report([Record(experiment(rounds=30), zigzag)], tmp_path / "r.html"))
    assert tab.evaluate("document.querySelectorAll('path.bare').length") == 0
    tab.evaluate(
        "(s => { s.value = 0.1; s.dispatchEvent(new Event('input')) })(document.querySelector('.smoothing input'))"
    )
    middle = tab.evaluate("smoothed(shown[0])[0].y.slice(1, -1)")
    assert sorted({round(value, 6) for value in middle}) == [0.466667, 0.533333]
    assert tab.evaluate("document.querySelectorAll('path.bare').length") > 0
    assert "3 values" in tab.evaluate("document.querySelector('.smoothing').textContent")


def test_every_chart_can_be_taken_away(tab: Browser, page: Path) -> None:
    """As a picture that is one, with its title, and as numbers."""
    tab.open(page)
    for place in range(tab.evaluate("shown.length")):
        title = tab.evaluate(f"shown[{place}].label")
        drawing = ElementTree.fromstring(tab.evaluate(f"picture(shown[{place}].host, shown[{place}])"))
        assert title in "".join(drawing.itertext())
        rows = list(csv.reader(tab.evaluate(f"CSV[shown[{place}].kind](shown[{place}])").splitlines()))
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}
    for kind in ("lines", "surface"):
        url = tab.evaluate(f"(p => bitmap(picture(p.host, p)))(shown.find(p => p.kind === '{kind}'))")
        picture = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))).convert("RGB")
        assert len(picture.getcolors(1 << 24) or []) > 50  # not blank


def test_tables_sort_by_what_their_cells_mean(tab: Browser, page: Path) -> None:
    tab.open(page)
    amounts = ["900", "1.2 k", "0:59", "1:10:00", "3.4 s", "-2", "60+", "1e-4", "word"]
    found = tab.evaluate(f"{amounts}.map(amountOf).map(n => Number.isNaN(n) ? null : n)")
    assert found == [900, 1200, 59, 4200, 3.4, -2, 60.5, 0.0001, None]
    column = "[...document.querySelectorAll('#clients tbody tr')].map(row => parseFloat(row.cells[2].textContent))"
    before = tab.evaluate(column)
    for turn in (False, True):
        tab.evaluate("document.querySelectorAll('#clients thead button')[2].click()")
        assert tab.evaluate(column) == sorted(before, reverse=turn)


def test_tables_sort_on_a_narrow_screen_where_heads_do_not_fit(tab: Browser, page: Path) -> None:
    column = "[...document.querySelectorAll('#clients tbody tr')].map(row => parseFloat(row.cells[2].textContent))"
    chooser = "document.querySelector('#clients .sorting')"
    tab.open(page, 1280)
    tab.evaluate("document.querySelectorAll('#clients details').forEach(each => each.open = true)")
    assert tab.evaluate(f"{chooser}.offsetHeight") == 0
    tab.open(page, 390)
    tab.evaluate("document.querySelectorAll('#clients details').forEach(each => each.open = true)")
    assert tab.evaluate(f"{chooser}.offsetHeight") > 0
    before = tab.evaluate(column)
    choose = f"(list => (list.value = '2', list.dispatchEvent(new Event('change'))))({chooser}.querySelector('select'))"
    tab.evaluate(choose)
    assert tab.evaluate(column) == sorted(before) != before
    tab.evaluate(f"{chooser}.querySelector('button').click()")
    assert tab.evaluate(column) == sorted(before, reverse=True)


def test_surfaces_stand_two_by_two_and_say_where_they_are_cut(tab: Browser, runs: list[Path], tmp_path: Path) -> None:
    methods = ("a", "b", "c", "d")
    for method in methods:
        shutil.copytree(runs[0], tmp_path / method)
        own = tmp_path / method / "experiment.toml"
        own.write_text(own.read_text().replace('method = "fedavg"', f'method = "fedprox(mu={ord(method)})"'))
    flat = tmp_path / "d" / "analysis" / "landscape.json"
    stored = json.loads(flat.read_text())
    stored["loss"][0][0] = 1e6
    flat.write_text(json.dumps(stored))
    tab.open(report([tmp_path / method for method in methods], tmp_path / "r.html"))
    edges = tab.evaluate(
        "[...document.querySelectorAll('#landscape .card')].map(c => c.getBoundingClientRect()).map(b => [b.x, b.y])"
    )
    assert len({x for x, _ in edges}) == len({y for _, y in edges}) == 2
    assert "≥" in tab.evaluate("document.querySelector('#landscape .ramp').textContent")
    assert "≥" not in tab.evaluate("document.querySelector('#eigenplane .ramp').textContent")


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


def test_a_served_page_shows_new_rounds_and_stays_as_the_reader_left_it(
    tab: Browser, page: Path, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SECONDS", 0.05)
    shutil.copytree(runs[0], tmp_path / "runs" / "one")
    metrics = tmp_path / "runs" / "one" / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:2]))
    live = serve.LiveReport([tmp_path / "runs"], port=0)
    thread = threading.Thread(target=live.run)
    thread.start()
    try:
        tab.open(live.url)
        assert "up to 2 rounds" in tab.evaluate("document.querySelector('.about').textContent")
        tab.evaluate("(document.documentElement.style.scrollBehavior = 'auto', scrollTo(0, 900))")
        tab.evaluate("(p => { p.zoom = { x: [1, 1.5], y: null }; p.draw() })(shown.find(p => p.kind === 'lines'))")
        observed = "observe(document.querySelector('main'), { childList: true })"
        changed = f"new Promise(done => new MutationObserver(done).{observed})"
        tab.evaluate(f"void (window.changed = {changed}.then(() => true))")
        metrics.write_text("".join(rows))
        assert tab.evaluate("window.changed")
        assert tab.evaluate("shown.find(p => p.kind === 'lines').series[0].x.at(-1)") == 4
        assert tab.evaluate("shown.find(p => p.kind === 'lines').zoom.x") == [1, 1.5]
        assert tab.evaluate("new Promise(done => setTimeout(() => done(scrollY), 100))") == 900
        assert "up to 4 rounds" in tab.evaluate("document.querySelector('.about').textContent")
    finally:
        tab.open(page)
        live.server.shutdown()
        thread.join()
    tab.errors = [error for error in tab.errors if not error.startswith(f"asked for {live.url}")]


def test_it_prints(tab: Browser, page: Path) -> None:
    tab.open(page, dark=True)
    assert tab.pdf().startswith(b"%PDF-")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
