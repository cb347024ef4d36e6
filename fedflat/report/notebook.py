"""A run in a notebook: a card with its results and curves."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

from fedflat.errors import InputError
from fedflat.report.figures import curves_figure
from fedflat.report.tabular import in_html
from fedflat.report.terminal import result_rows
from fedflat.runs.records import Record


def summary(record: Record) -> str:
    """The set-up and the results of a run as one HTML text, with its curves if matplotlib is installed."""
    e = record.experiment
    heads = (e.method, f"{e.model} on {e.data}, {e.partition}, {e.clients} clients, {e.participation}, seed {e.seed}")
    return in_html(heads, result_rows(record), side="left") + _curves(record)


def _curves(record: Record) -> str:
    try:
        figure = curves_figure([record])
    except InputError:  # no finished round, or no matplotlib
        return ""
    png = BytesIO()
    figure.savefig(png, format="png")
    return f'<img alt="curves over the rounds" src="data:image/png;base64,{b64encode(png.getvalue()).decode()}"/>'
