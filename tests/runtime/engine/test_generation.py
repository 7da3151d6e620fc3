"""Stop strings end an answer, wherever they lie in its pieces; so do loops."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.generation import LoopWatch, StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.add(piece) for piece in pieces) + matcher.flush()
    return out, matcher.found


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


letters = st.text(alphabet="ab\n", max_size=12)


@given(text=letters, stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3), places=st.data())
def test_any_chunking_gives_the_same_text(text: str, stops: list[str], places: st.DataObject) -> None:
    pieces = cut(text, places.draw(st.lists(st.integers(0, 12), max_size=8)))
    begin = min((text.find(stop) for stop in stops if stop in text), default=None)
    out, stop = feed(stops, pieces)
    assert out == text[:begin]
    assert stop is None if begin is None else (stop in stops and text.startswith(str(stop), begin))


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stop"),
    [
        ([], ["a", "b"], "ab", None),
        (["END"], ["text E", "N", "D more"], "text ", "END"),
        (["END"], ["text E", "N", "E"], "text ENE", None),
        (["\nUser:", "</s>"], ["hi\n", "User", ": x"], "hi", "\nUser:"),
        (["abc", "b"], ["xab", "c"], "x", "abc"),
        (["abd", "b"], ["xab", "c"], "xa", "b"),
        (["ab"], ["a"], "a", None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], out: str, stop: str | None) -> None:
    assert feed(stops, pieces) == (out, stop)


def test_what_cannot_be_a_stop_is_given_out_at_once() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.add("hello\nUs") == "hello"
    assert matcher.add("a") == "\nUsa"
    assert matcher.add("\nUser: never seen") == ""
    assert matcher.add("more") == matcher.flush() == ""


@pytest.mark.parametrize(("length", "after"), [(1, 161), (20, 180), (41, 205), (256, 1280), (257, None)])
def test_a_passage_that_comes_again_and_again_is_a_loop(length: int, after: int | None) -> None:
    """For 160 tokens, and at least five times; what comes before it, and how often a token is in it, doesn't matter."""
    watch, passage = LoopWatch(), [7, 7, *range(1000, 1255)][:length]
    assert not any(watch.add(token) for token in range(300))
    found = (number for number, token in enumerate(itertools.cycle(passage), 1) if watch.add(token) or number > 3000)
    assert next(found) == (after or 3001)


def test_what_counts_on_or_comes_back_later_is_no_loop() -> None:
    watch = LoopWatch()
    lines = [token for line in range(400) for token in (5, line, 6, 11, 13)]
    verses = [token for verse in range(60) for token in (*range(500, 530), verse)] + [1] * 100
    assert not any(watch.add(token) for token in (*lines, *verses))
