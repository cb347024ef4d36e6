"""The language of method strings: what is read, what is refused, and that nothing is ever run."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.errors import InputError, UnknownNameError
from fedflat.specs import Call, build, parse, parse_sum

VALUES = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
CALLS = st.builds(Call, NAMES, st.lists(VALUES, max_size=3).map(tuple), st.dictionaries(NAMES, VALUES, max_size=3))


@given(st.lists(CALLS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_what_is_written_is_read_back(calls: list[Call]) -> None:
    assert parse_sum("+".join(map(str, calls))) == calls


@given(st.text(max_size=30))
@settings(deadline=None, max_examples=200)
def test_any_text_is_read_or_refused_with_a_typed_error(text: str) -> None:
    try:
        calls = parse_sum(text)
    except InputError:
        return
    assert parse_sum("+".join(map(str, calls))) == calls


@pytest.mark.parametrize(
    "text",
    [
        "x(__import__('os'))",
        "x(y=__import__('os').system('true'))",
        "x(a.b)",
        "x.y(1)",
        "x(1)(2)",
        "[x for x in (1,)]",
        "lambda: 1",
        "x(1 + 1)",
        "x(*[1, 2])",
        "x(f'{1}')",
        "x - y",
        "x(",
        "1",
        "",
        "x\ny",
        "x(1); y",
    ],
)
def test_nothing_but_calls_of_literals_is_read(text: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        parse_sum(text)


@pytest.mark.parametrize("text", ["x(**{'mu': 1})", "x(mu=1, mu=2)", "x({[1]: 2})"])
def test_nothing_that_was_written_is_silently_dropped(text: str) -> None:
    with pytest.raises(InputError):
        parse_sum(text)


def test_one_call_is_not_a_sum() -> None:
    with pytest.raises(InputError, match="names 2 things"):
        parse("a+b")


def make(context: int, mu: float = 0.1, rho: float = 0.2) -> tuple[int, float, float]:
    return context, mu, rho


def test_build_passes_context_then_arguments() -> None:
    assert build("method", parse("prox(0.5, rho=3)"), {"prox": make}, 7) == (7, 0.5, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("porx", "did you mean 'prox'"),
        ("prox(m=1)", "did you mean 'mu'"),
        ("prox(context=1)", "unknown field"),
        ("prox(1, 2, 3)", "at most 2 values"),
        ("prox(1, mu=2)", "mu"),
    ],
)
def test_wrong_names_and_counts_say_what_is_near(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("method", parse(text), {"prox": make}, 7)


def test_a_name_like_nothing_known_lists_what_is_known() -> None:
    with pytest.raises(UnknownNameError, match="known: prox, sam"):
        build("method", Call("zzzzzz"), {"sam": make, "prox": make}, 7)
