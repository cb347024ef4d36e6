"""The layers of the package: which may import which, checked by tests/test_layers.py, and a picture of them.

    python docs/layers.py        draws docs/images/layers.svg from the import graph

Every `import` counts, also inside functions and under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
LAYERS = (  # lowest first; a module may import from its own layer and from those below
    ("errors", "extras", "words", "console", "experiment", "specs"),
    ("core",),
    ("data", "models", "tasks"),
    ("analysis",),
    ("parts",),
    ("engine", "presets"),
    ("runs",),
    ("cost", "studies", "tracking"),
    ("report", "flower"),
    ("cli",),
)
UPWARD = {  # (module, what it imports) → why this is allowed
    ("core.registry", "parts"): "method strings name the parts of the package, which are loaded when the first is read",
    ("runs.result", "report.figures"): "Run.plot()",
    ("runs.result", "report.html"): "Run.report()",
    ("runs.result", "report.notebook"): "a run shows itself in a notebook",
}
TOP = " · ".join(LAYERS[0])
FACADE = ("", "__main__")  # `import fedflat` offers names of all layers, loaded when first used


def modules() -> dict[str, Path]:
    """All modules by their name below `fedflat`, packages without `__init__`."""
    root = HOME / "fedflat"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Module → modules of the package that it imports, anywhere in it."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = {target for node in ast.walk(ast.parse(path.read_text())) for target in _targets(node, known)}
        graph[name] = targets - {name, ""}
    return graph


def _targets(node: ast.AST, known: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedflat":
        base = node.module.removeprefix("fedflat").lstrip(".")
        inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
        return {name for name in inner if name in known} or {base}
    if isinstance(node, ast.Import):
        return {alias.name.removeprefix("fedflat.") for alias in node.names if alias.name.startswith("fedflat.")}
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        value = node.args[0]
        if isinstance(value, ast.Constant) and str(value.value).startswith("fedflat."):
            return {str(value.value).removeprefix("fedflat.")}
    return set()


def layer(module: str) -> int:
    """The number of a module's layer, 0 for the lowest."""
    return next(place for place, names in enumerate(LAYERS) if module.split(".")[0] in names)


def upward() -> set[tuple[str, str]]:
    """All imports that point to a higher layer."""
    edges = ((name, target) for name, targets in imports().items() if name not in FACADE for target in targets)
    return {(name, target) for name, target in edges if layer(target) > layer(name)}


def floors() -> list[str]:
    """The longest chain of imports, without those listed in `UPWARD`; a cycle is an error."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        if name in path:
            raise ValueError(f"modules import each other: {' → '.join([*path, name])}")
        path.append(name)
        targets = [target for target in imports()[name] if (name, target) not in UPWARD]
        longest = max((below(target) for target in targets), key=len, default=())
        path.pop()
        return (name, *longest)

    path: list[str] = []
    return list(max((below(name) for name in imports() if name not in FACADE), key=len))


def packages() -> dict[str, set[str]]:
    """Package → packages that it imports; the modules at the top level count as one."""
    graph: dict[str, set[str]] = {}
    for name, targets in imports().items():
        if name not in FACADE:
            pairs = {(_package(name), _package(target)) for target in targets if (name, target) not in UPWARD}
            graph.setdefault(_package(name), set()).update(b for a, b in pairs if a != b)
    return graph


def _package(module: str) -> str:
    first = module.split(".")[0]
    return TOP if first in LAYERS[0] else first


def reduced(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that do not follow from others: a → c is left out where there is a → b → … → c."""

    def reaches(a: str, c: str) -> bool:
        return c in graph[a] or any(reaches(b, c) for b in graph[a])

    return {(a, c) for a in graph for c in graph[a] if not any(reaches(b, c) for b in graph[a] - {c})}


def draw() -> str:
    """The packages in their layers as SVG, with arrows for the imports that do not follow from others."""
    height, width, box = 64, 640, 26
    rows = [*reversed(LAYERS[1:]), (TOP,)]
    places: dict[str, tuple[float, float]] = {}
    for row, names in enumerate(rows):
        for column, name in enumerate(names):
            places[name] = (width * (column + 0.5) / len(names), 24 + row * height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(rows)}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        "<title>The layers of the package: imports point downwards</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5b6673"/></marker></defs>',
        f'<rect width="{width}" height="{height * len(rows)}" fill="#fff"/>',
    ]
    for a, b in sorted(reduced(packages())):
        (x0, y0), (x1, y1) = places[a], places[b]
        lines.append(
            f'<path d="M{x0:.0f} {y0 + box / 2:.0f} C{x0:.0f} {y0 + height * 0.6:.0f} {x1:.0f} {y1 - height * 0.6:.0f} '
            f'{x1:.0f} {y1 - box / 2:.0f}" fill="none" stroke="#5b6673" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in places.items():
        half = 4.2 * len(name) + 12
        lines.append(
            f'<rect x="{x - half:.0f}" y="{y - box / 2:.0f}" width="{2 * half:.0f}" height="{box}" rx="6" '
            f'fill="#eef5fa" stroke="#0072b2"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'fill="#1c2733">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (HOME / "docs" / "images" / "layers.svg").write_text(draw())
