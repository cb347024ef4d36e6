"""Prepare the pages of the documentation site in .site-src/: these pages, the notebooks and an API reference.

    python docs/site.py && mkdocs build --strict        (make docs does both)

Pages are copied as they are. Formulas become MathML, which browsers draw without a script.
Links to files that are not part of the site lose their target and keep their text.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

from latex2mathml.converter import convert

HOME = Path(__file__).resolve().parents[1]
OUT = HOME / ".site-src"
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)((?:[^$\n]|\n(?!\n))+?)(?<=\S)\$(?!\w)", re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
START = ["README.md", "primer.md", "quick-start.md", "concepts.md", "faq.md", "glossary.md", "gallery.md"]
RESULTS = ["results.md", "leaderboard.md", "findings.md", "performance.md"]
DEEPER = ["analysis.md", "extending.md", "reproducibility.md"]
REFERENCE = {
    "Running": ["runs.runner", "runs.result", "runs.callbacks", "runs.series"],
    "Describing an experiment": ["experiment", "presets"],
    "Data": ["data", "data.federation", "data.samples", "data.preprocess"],
    "Tasks and metrics": ["tasks"],
    "Writing a method": ["core.part", "core.method", "core.views", "core.flat", "core.registry", "core.fields"],
    "Analyses": ["analysis", "studies.study"],
    "Results": ["report.compare", "report.comparison", "report.html"],
    "Errors": ["errors"],
}


def main() -> None:
    """Write all pages."""
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(HOME / "docs", OUT, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.ipynb"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(HOME / name, OUT / name.lower())
    for notebook in sorted((HOME / "docs" / "notebooks").glob("*.ipynb")):
        page = OUT / "notebooks" / f"{notebook.stem}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(as_page(json.loads(notebook.read_text())))
    reference()
    for page in OUT.rglob("*.md"):
        page.write_text(with_formulas(LINK.sub(partial(_kept, page=page), page.read_text())))


def with_formulas(text: str) -> str:
    """Markdown with its LaTeX formulas as MathML; code is left as it is.

    >>> with_formulas("`$x$` and $x$")
    '`$x$` and <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    return "".join(part if place % 2 else FORMULA.sub(_mathml, part) for place, part in enumerate(CODE.split(text)))


def _mathml(found: re.Match[str]) -> str:
    block, inline = found.groups()
    return str(convert(block or inline, display="block" if block else "inline")).replace("\n", " ")


def on_config(config: dict[str, object]) -> dict[str, object]:
    """Give mkdocs the order of the pages; it calls this before it builds the site."""
    config["nav"] = [
        {"Start here": [*START, {"Notebooks": _in("notebooks")}]},
        {"How to": _in("how-to")},
        {"Methods": ["methods/README.md", *_in("methods")]},
        {"Results": RESULTS},
        {"Reference": [*DEEPER, {"API": ["reference/README.md", *_in("reference")]}]},
        {"Project": ["contributing.md", "changelog.md", "security.md"]},
    ]
    return config


def _in(folder: str) -> list[str]:
    return [f"{folder}/{page.name}" for page in sorted((OUT / folder).glob("*.md")) if page.name != "README.md"]


def as_page(notebook: dict[str, list[dict[str, object]]]) -> str:
    """A notebook as Markdown."""
    pieces = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])  # type: ignore[arg-type]
        pieces.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(pieces) + "\n"


def reference() -> None:
    """One page per group of modules, made from the docstrings."""
    folder = OUT / "reference"
    folder.mkdir(exist_ok=True)
    lines = ["# API reference", "", "From the docstrings of the code.", ""]
    for title, modules in REFERENCE.items():
        name = title.lower().replace(" ", "-")
        blocks = [f"::: fedflat.{module}" for module in modules if _exists(module)]
        (folder / f"{name}.md").write_text("\n\n".join([f"# {title}", *blocks]) + "\n")
        lines.append(f"- [{title}]({name}.md)")
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _exists(module: str) -> bool:
    path = HOME / "fedflat" / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _kept(found: re.Match[str], page: Path) -> str:
    """A link as it is if its target is on the site, else its text."""
    picture, text, target = found.groups()
    path = target.partition("#")[0]
    whole = (page.parent / path).resolve()
    if not path or "://" in target or (whole.is_relative_to(OUT) and whole.exists()):
        return found.group(0)
    moved = OUT / Path(path).name.lower()
    if moved.suffix == ".md" and moved.exists():
        up = "../" * len(page.parent.relative_to(OUT).parts)
        return f"{picture}[{text}]({up}{moved.name})"
    notebook = (page.parent / path).with_suffix(".md")
    return f"[{text}]({path.removesuffix('.ipynb')}.md)" if notebook.exists() else text


if __name__ == "__main__":
    main()
