"""A leaderboard as Markdown, JSON, and one HTML file whose table can be sorted and filtered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedflat.report.board.entry import BASELINE
from fedflat.report.board.standings import Ranking, Row
from fedflat.report.tabular import markdown
from fedflat.runs.files import write_atomically
from fedflat.words import MISSING, amount

HEADS = (
    *("setting", "method", "with", "lr", "seeds", "accuracy", "against FedAvg", "rounds to FedAvg’s best"),
    *("lowest 5 %", "λ max", "λ₁/λ₅", "trace", "floats sent", "time ÷ FedAvg", "note"),
)
ABOUT = (
    "Every method had the same search: three learning rates, then three values of its main hyper-parameter, on one "
    "seed and on training samples that are used for nothing else. Accuracy: mean over the last tenth of the rounds and "
    "over the seeds, ± the deviation between them. p: paired t-test over the seeds against FedAvg, of each method "
    "by itself; among many methods some are below 0.05 by chance. So beside it stands p with Holm’s correction for the "
    "number of methods in the setting, and only that one calls a method better or worse. λ max, λ₁/λ₅ and trace: of "
    "the first seed’s model. Time: of a round’s training on one thread, in turns with FedAvg’s."
)


def cells(row: Row) -> list[tuple[str, float | str]]:
    """Text and sorting key of every cell of a row."""
    spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
    accuracy = MISSING if row["accuracy"] is None else f"{100 * row['accuracy']:.2f}{spread}"
    told = row["p_holm"] is not None and row["p_holm"] < 0.05
    verdict = (" better" if row["better"] else " worse") if told else ""
    p = MISSING if row["p_holm"] is None else f"p {_p(row['p'])}, corrected {_p(row['p_holm'])}{verdict}"
    return [
        (row["setting"], row["setting"]),
        (row["method"], row["method"]),
        (row["chosen"] or MISSING, row["chosen"] or ""),
        (MISSING if row["lr"] is None else f"{row['lr']:g}", row["lr"] or 0.0),
        (str(row["seeds"]), row["seeds"]),
        (accuracy, -1.0 if row["accuracy"] is None else row["accuracy"]),
        (p, 2.0 if row["p"] is None else row["p"]),
        _number(row["rounds_to"], ".0f", "not in every seed" if row["accuracy"] is not None else MISSING),
        _number(None if row["low5"] is None else 100 * row["low5"], ".2f"),
        _number(row["lambda_max"], ".4g"),
        _number(row["ratio5"], ".3g"),
        _number(row["trace"], ".4g"),
        (MISSING if row["floats"] is None else amount(row["floats"]), row["floats"] or 0.0),
        _number(row["time"], ".2f"),
        (row["failure"], row["failure"]),
    ]


def _p(value: float) -> str:
    return "< 0.001" if value < 0.0005 else f"{value:.3f}"


def _number(value: float | None, form: str, missing: str = MISSING) -> tuple[str, float]:
    return (missing, float(10**12)) if value is None else (format(value, form), value)


def rank_lines(ranking: Ranking) -> list[str]:
    """Mean ranks, and which methods cannot be told apart, in words."""
    if len(ranking.ranks) < 2:
        return ["There are no ranks: fewer than two methods have a result in every setting and for every seed."]
    names = list(ranking.ranks)
    lines = [
        f"Mean ranks over {ranking.blocks} blocks (a setting and a seed): "
        + ", ".join(f"{name} {rank:.2f}" for name, rank in ranking.ranks.items())
        + ".",
        f"Methods whose mean ranks differ by less than {ranking.difference:.2f} (Nemenyi’s critical difference at 5 %) "
        "are not told apart. Blocks of one setting share their data, so the true difference is rather larger.",
    ]
    lines += [f"Not told apart from the best, {names[0]}: {_listed(ranking.near(names[0]))}."]
    if BASELINE in names:
        apart = [name for name in names if name != BASELINE and name not in ranking.near(BASELINE)]
        better = [name for name in apart if ranking.ranks[name] < ranking.ranks[BASELINE]]
        worse = [name for name in apart if name not in better]
        lines += [f"Told apart from {BASELINE}: better, {_listed(better)}; worse, {_listed(worse)}."]
    if ranking.left_out:
        lines.append(f"Not ranked, as results are missing: {', '.join(ranking.left_out)}.")
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def write_board(title: str, rows: Sequence[Row], ranking: Ranking, out: Path) -> list[Path]:
    """Write `leaderboard.html`, `leaderboard.md` and `leaderboard.json`; returns their paths."""
    notes = [ABOUT, *rank_lines(ranking)]
    content = {
        "title": title,
        "rows": list(rows),
        "ranks": dict(ranking.ranks),
        "critical_difference": ranking.difference if len(ranking.ranks) > 1 else None,
        "groups": [list(ranking.ranks)[first : last + 1] for first, last in ranking.groups],
    }
    texts = {
        "leaderboard.html": _page(title, rows, notes),
        "leaderboard.md": markdown(HEADS, [[text for text, _ in cells(row)] for row in rows], notes),
        "leaderboard.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    return [out / name for name in texts]


def _page(title: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    head = "".join(f'<th tabindex="0" role="button">{escape(name)}</th>' for name in HEADS)
    body = "\n".join(_line(row) for row in rows)
    settings = "".join(f"<option>{escape(name)}</option>" for name in dict.fromkeys(row["setting"] for row in rows))
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return PAGE.format(
        title=escape(title), style=STYLE, script=SCRIPT, head=head, body=body, settings=settings, notes=said
    )


def _line(row: Row) -> str:
    kind = "failed" if row["accuracy"] is None else ""
    found = "".join(f'<td data-key="{escape(str(key))}">{escape(text)}</td>' for text, key in cells(row))
    return f'<tr class="{kind}" data-setting="{escape(row["setting"])}">{found}</tr>'


STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:96rem;padding:0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid #8884}
th{cursor:pointer;position:sticky;top:0;background:Canvas;white-space:normal;vertical-align:bottom}
td:nth-child(-n+3),th:nth-child(-n+3),td:last-child,th:last-child{text-align:left}
td:last-child{white-space:normal;min-width:10rem}
th[aria-sort=ascending]::after{content:" ▲"}th[aria-sort=descending]::after{content:" ▼"}
tr.failed{opacity:.6}.filters{display:flex;gap:1rem;flex-wrap:wrap;margin:1rem 0}
"""
SCRIPT = """
const body=document.querySelector("tbody"),heads=[...document.querySelectorAll("th")];
const [find,setting,done]=["#find","#setting","#done"].map(id=>document.querySelector(id));
function show(){for(const row of body.rows){const text=row.textContent.toLowerCase();
 row.hidden=!text.includes(find.value.toLowerCase())||(setting.value!==""&&row.dataset.setting!==setting.value)||
 (done.checked&&row.classList.contains("failed"))}
 const shown=[...body.rows].filter(r=>!r.hidden).length;
 document.querySelector("#count").textContent=shown+" of "+body.rows.length+" rows"}
function sort(place){const up=heads[place].getAttribute("aria-sort")!=="ascending";
 heads.forEach(h=>h.removeAttribute("aria-sort"));heads[place].setAttribute("aria-sort",up?"ascending":"descending");
 const key=row=>row.cells[place].dataset.key,rows=[...body.rows];
 rows.sort((a,b)=>{const x=key(a),y=key(b),n=Number(x)-Number(y);
  return (x!==""&&y!==""&&!isNaN(n)?n:x.localeCompare(y))*(up?1:-1)});
 body.append(...rows)}
heads.forEach((h,i)=>{h.onclick=()=>sort(i);
 h.onkeydown=e=>{if(e.key==="Enter"||e.key===" "){e.preventDefault();sort(i)}}});
for(const e of [find,setting,done])e.oninput=show;show();
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<div class="filters"><label>Filter <input id="find" type="search" placeholder="a method, a setting, …"></label>
<label>Setting <select id="setting"><option value="">all</option>{settings}</select></label>
<label><input id="done" type="checkbox"> without failed rows</label><span id="count"></span></div>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>
<section>{notes}</section>
<script>{script}</script></body></html>
"""
