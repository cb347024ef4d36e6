"""A table of text as GitHub Markdown, LaTeX, HTML, or comma-separated values."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

Cells = Sequence[Sequence[str]]
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "–": "--",
    "[": "{[}",  # at the start of a row, these two would become an argument of the line break before it
    "*": "{*}",
} | {special: f"\\{special}" for special in "{}$&#_%"}


def markdown(heads: Sequence[str], rows: Cells, notes: Sequence[str] = ()) -> str:
    """A GitHub Markdown table, the first column aligned left and the others right."""
    rule = [":---", *["---:"] * (len(heads) - 1)]
    lines = [f"| {' | '.join(line)} |" for line in (map(_marked, heads), rule, *(map(_marked, row) for row in rows))]
    return "\n".join([*lines, *(f"\n{_marked(note)}" for note in notes), ""])


def _marked(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def latex(heads: Sequence[str], rows: Cells, notes: Sequence[str] = ()) -> str:
    r"""A LaTeX table with the notes as its caption. It needs `\usepackage{booktabs}`."""
    body = [" & ".join(map(in_latex, row)) + r" \\" for row in (heads, *rows)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{' '.join(map(in_latex, notes))}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def in_latex(text: str) -> str:
    r"""Text with LaTeX's special characters escaped.

    >>> in_latex("keep_momentum, 5 %")
    'keep\\_momentum, 5 \\%'
    """
    return "".join(LATEX.get(character, character) for character in text)


def in_html(heads: Sequence[str], rows: Cells, notes: Sequence[str] = (), side: str = "right") -> str:
    """An HTML table without a style of its own; all text is escaped. side: alignment of all columns but the first."""
    lines = [_line("th", heads, side), *(_line("td", row, side) for row in rows)]
    small = "".join(f"<br>{html.escape(note)}" for note in notes)
    return f"<table>{''.join(lines)}</table>" + (f"<small>{small.removeprefix('<br>')}</small>" if small else "")


def _line(tag: str, cells: Sequence[str], side: str) -> str:
    looks = [f"text-align:{way};padding:1px 8px" for way in ("left", *[side] * (len(cells) - 1))]
    pairs = zip(looks, cells, strict=True)
    texts = [f'<{tag} style="{look}">{html.escape(cell)}</{tag}>' for look, cell in pairs]
    return f"<tr>{''.join(texts)}</tr>"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values with a header. Numbers have all their digits; None is empty.

    The elements of a list are separated by spaces, with "nan" for None.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def _plain(value: Any) -> Any:
    return " ".join("nan" if v is None else str(v) for v in value) if isinstance(value, list) else value
