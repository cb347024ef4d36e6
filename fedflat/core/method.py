"""`Method`: a sum of parts, sorted into the order in which the loops call them."""

from __future__ import annotations

from collections.abc import Iterable

from fedflat.core.part import SINGLE_OWNER, SLOTS, Part, fills
from fedflat.core.registry import named_sums, parse_parts
from fedflat.errors import InputError

_DEFAULT = Part()


class Method:
    """A sum of parts. `str` is its one name, however it was written.

    >>> {str(Method.parse(text)) for text in ("sam+fedavg", "fedavg+sam", "fedsam", "sam", "sam(0.05)")}
    {'sam'}

    Raises:
        InputError: A part appears twice, or two parts cannot be combined; the message names both.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: (part.rank, part.name)))
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{name!r} appears twice in the method {'+'.join(names)!r}; give it once")
        self._fillers = {slot: tuple(p for p in self.parts if fills(p, slot)) for slot in SLOTS}
        self._check_claims()
        for part in self.parts:
            self._check_others(part)

    def _check_claims(self) -> None:
        claimed = [(what, part) for slot, what in SINGLE_OWNER.items() for part in self._fillers[slot]]
        claimed += [(SINGLE_OWNER["personal"], part) for part in self.parts if part.adapts]
        claimed += [(what, part) for part in self.parts for what in part.claims]
        owners: dict[str, Part] = {}
        for what, part in claimed:
            first = owners.setdefault(what, part)
            if first is not part:
                raise InputError(f"{first.name!r} and {part.name!r} cannot be combined: both claim {what}")

    def _check_others(self, part: Part) -> None:
        for other in self.parts if part.needs_mean else ():
            if other is not part and (fills(other, "combine") or other.replaces_mean):
                raise InputError(
                    f"{part.name!r} and {other.name!r} cannot be combined: the server step of {part.name!r} needs "
                    f"clients' own updates or their plain mean, which {other.name!r} replaces"
                )
        for slot, why in part.alone_in.items():
            for other in self._fillers[slot]:
                if other is not part:
                    raise InputError(f"{part.name!r} and {other.name!r} cannot be combined: {why}")

    @classmethod
    def parse(cls, text: str | Part | Method) -> Method:
        """Read `"feddc(alpha=0.01)+man"`; a part or a method is accepted as well."""
        if isinstance(text, Method):
            return text
        if isinstance(text, Part):
            return cls([text])
        parts = parse_parts(text)
        try:  # `fedavg` changes nothing: it stands alone or not at all, so that a method has one name
            return cls([part for part in parts if part.name != "fedavg"] or parts[:1])
        except InputError as error:
            raise InputError(f"{error}{''.join(f' ({told})' for told in named_sums(text))}") from None

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"Method.parse({str(self)!r})"

    def __add__(self, part: Part) -> Method:
        return Method([*self.parts, part])

    def filling(self, slot: str) -> tuple[Part, ...]:
        """The parts that fill `slot`, in the order of their calls."""
        return self._fillers[slot]

    def owner(self, slot: str) -> Part:
        """The one part that owns `slot`; a plain `Part` with the default behaviour if no part fills it."""
        return self._fillers[slot][0] if self._fillers[slot] else _DEFAULT

    @property
    def uniform(self) -> bool:
        """Whether `weighting="auto"` means unweighted means over clients."""
        return any(part.uniform for part in self.parts)
