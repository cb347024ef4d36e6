"""Some test samples as pictures: the image, the truth, and what each method predicts."""

from __future__ import annotations

import colorsys
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedflat.report.page.markup import Html, Section, tag
from fedflat.report.page.page import Page, named
from fedflat.report.page.run_groups import Group
from fedflat.report.png import as_link, png
from fedflat.runs.records import Record

if TYPE_CHECKING:
    from torch import Tensor

MOST = 6  # methods whose predictions are shown
Colour = tuple[int, int, int]
NOTHING: Colour = (0, 0, 0)  # pixels without a label
GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.75rem;margin:0 0 1rem"


@dataclass(frozen=True)
class Kept:
    """The pictures of a run. classes: names of the classes; empty where they have none."""

    group: Group
    tensors: dict[str, Tensor]
    classes: list[str]

    @property
    def tests(self) -> list[str]:
        """Names of the test sets, the common one first."""
        names = {name.partition("/")[0] for name in self.tensors}
        return sorted(names, key=lambda name: (name != "test", name))

    @property
    def count(self) -> int:
        """The number of classes that occur in the pictures, or have a name."""
        labels = [t for name, t in self.tensors.items() if not name.endswith("/image")]
        return max([len(self.classes), *(1 + int(t.max()) for t in labels)])


def pictures(page: Page) -> Section | None:
    """Images with truth and predictions of the first run of every method that has kept any."""
    kept = [one for group in page.groups if (one := _kept(group))]
    if not kept:
        return None
    first, colours = kept[0], palette(max(one.count for one in kept))
    alike = [one for one in kept if _same(one, first)]
    rows = [
        _row(alike[:MOST], test, place, colours)
        for test in first.tests
        for place in range(len(first.tensors[f"{test}/image"]))
    ]
    left = len(kept) - len(alike[:MOST])
    how = "Test samples with the truth and what the model of the first seed predicts; black pixels have no label."
    how += f" {left} more methods are not shown." if left else ""
    return Section("pictures", "Pictures", how, [_key(first.classes, colours), *rows])


def palette(count: int) -> list[Colour]:
    """Colours that are easy to tell apart, one per class."""
    steps = [(0.08 + place * 0.6180339887) % 1 for place in range(count)]  # neighbours in number are far apart in hue
    levels = [(0.55, 0.95), (0.75, 0.75), (0.45, 0.85)]
    found = [colorsys.hsv_to_rgb(hue, *levels[place % 3]) for place, hue in enumerate(steps)]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in found]


def _kept(group: Group) -> Kept | None:
    for record in group.records:
        path = _path(record)
        if path is not None:
            from fedflat.runs.files import metadata_of, read_tensors  # here: without pictures a report needs no torch

            classes = json.loads(metadata_of(path).get("classes", "[]"))
            return Kept(group, read_tensors(path), [str(name) for name in classes])
    return None


def _path(record: Record) -> Path | None:
    path = record.path / "pictures.safetensors" if record.path else None
    return path if path is not None and path.is_file() else None


def _same(one: Kept, other: Kept) -> bool:
    """Whether both show the same samples."""
    names = [name for name in other.tensors if not name.endswith("/prediction")]
    return all(name in one.tensors and one.tensors[name].equal(other.tensors[name]) for name in names)


def _row(kept: list[Kept], test: str, place: int, colours: list[Colour]) -> Html:
    first = kept[0].tensors
    image = np.moveaxis(first[f"{test}/image"][place].numpy(), 0, -1)
    where = f"{'common' if test == 'test' else test} test set, sample {place + 1}"
    cells = [_figure(png(image if image.shape[-1] == 3 else image[..., 0]), "image", f"image: {where}")]
    cells.append(_figure(_coloured(first[f"{test}/truth"][place], colours), "truth", f"truth: {where}"))
    for one in kept:
        content = _coloured(one.tensors[f"{test}/prediction"][place], colours)
        cells.append(_figure(content, named(one.group), f"prediction of {one.group.label}: {where}"))
    return tag("div", tag("p", where, class_="small"), tag("div", *cells, style=GRID))


def _figure(content: bytes, caption: str, text: str) -> Html:
    image = f'<img src="{as_link(content)}" alt="{html.escape(text)}" style="width:100%;image-rendering:pixelated">'
    below = tag("figcaption", caption, style="font-weight:normal;font-size:.8rem;overflow-wrap:anywhere")
    return tag("figure", Html(image), below, style="margin:0")


def _coloured(labels: Tensor, colours: list[Colour]) -> bytes:
    """Class numbers as a picture; the last colour stands for pixels without a label."""
    numbers = labels.numpy()
    return png(np.where(numbers < 0, len(colours), numbers), [*colours, NOTHING])


def _key(classes: list[str], colours: list[Colour]) -> Html:
    """Which colour is which class."""
    entries = []
    for place, (red, green, blue) in enumerate(colours):
        box = f"display:inline-block;width:.9em;height:.9em;margin:0 .35em 0 0;background:rgb({red},{green},{blue})"
        name = classes[place] if place < len(classes) else f"class {place}"
        entries.append(tag("span", tag("i", style=box), name, style="margin:0 1em 0 0;white-space:nowrap"))
    return tag("p", *entries, class_="small")
