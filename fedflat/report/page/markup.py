"""HTML from Python. Every text is escaped here: only what `tag` and `joined` have made is taken as markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Html(str):
    """Markup. Any other text that goes into a page is escaped."""

    __slots__ = ()


def escaped(text: str) -> Html:
    """Text as markup that shows it as it stands."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def joined(parts: Iterable[str]) -> Html:
    """Texts and markup, one after the other."""
    return Html("".join(map(escaped, parts)))


def breakable(text: str) -> Html:
    """Text that may continue in the next line after the signs of a method, as in `scaffold+asam(rho=0.5)`.

    >>> breakable("a+b(c=1)")
    'a+<wbr>b(c=1)'
    """
    return Html(re.sub(r"([+,/_])(?=\S)", r"\1<wbr>", escaped(text)))


def tag(name: str, *content: str, **attributes: str | None) -> Html:
    """An element. Attributes are written as names of Python (`class_`, `data_key`); those that are None are left out.

    >>> tag("a", "x < y", href="#top", class_="far")
    '<a href="#top" class="far">x &lt; y</a>'
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    inside = "".join(f' {key}="{html.escape(value)}"' for key, value in pairs)
    return Html(f"<{name}{inside}>{joined(content)}</{name}>")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str, look: str | None = None) -> Html:
    """A table whose first column names the row. On a narrow screen each row is a card, so cells carry their head.

    look: a class of the style sheet.
    """
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(_cell(h, c) for h, c in zip(heads[1:], row[1:], strict=True)))
        for row in rows
    ]
    made = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *body), class_=look)
    return tag("div", made, class_="scroll")


def _cell(head: str, content: str) -> Html:
    return tag("td", tag("span", content), data_head=head)


def formula(text: str) -> Html:
    """A formula in plain characters with its indices lowered: `w_k` and `w_{k+1}`.

    >>> formula("w_k < 1")
    '<p class="formula">w<sub>k</sub> &lt; 1</p>'
    """
    parts = re.split(r"_(?:\{([^}]*)\}|(\w+))", text)
    plain, braced, bare = parts[::3], parts[1::3], parts[2::3]
    indices = [tag("sub", inner or word or "") for inner, word in zip(braced, bare, strict=True)]
    return tag("p", *(piece for pair in zip(plain, [*indices, ""], strict=True) for piece in pair), class_="formula")


def folded(title: str, *content: str) -> Html:
    """Something to be opened on demand."""
    return tag("details", tag("summary", title), *content)


@dataclass(frozen=True)
class Section:
    """One part of the page. how: a sentence on how to read it. menu: its name in the menu, if not its title."""

    key: str
    title: str
    how: str
    body: Sequence[str]
    menu: str = ""

    def markup(self) -> Html:
        """The section as an element that can be linked to."""
        head = tag("h2", self.title, id=f"{self.key}-title")
        how = tag("p", self.how, class_="how")
        return tag("section", head, how, *self.body, id=self.key, aria_labelledby=f"{self.key}-title")
