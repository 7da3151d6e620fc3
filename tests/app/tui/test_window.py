"""The messages that are mounted in a long chat."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.tui.window import FIRST, MOST, STEP, Window


def test_it_begins_with_the_newest() -> None:
    assert Window.at_end(5) == Window(start=0, end=5, total=5)
    assert Window.at_end(100) == Window(start=100 - FIRST, end=100, total=100)


def test_steps() -> None:
    window = Window.at_end(100).earlier()
    assert (window.start, window.end) == (90 - FIRST, 100)
    window = window.earlier().earlier().earlier()
    assert (window.start, window.end) == (60 - FIRST, 100 - FIRST)
    window = window.later()
    assert (window.start, window.end) == (60, 100)
    assert Window.at_end(100).earlier().earlier().earlier(keep_end=True).end == 100


@given(st.integers(0, 300), st.lists(st.sampled_from(["earlier", "later", "grown"]), max_size=60))
def test_any_walk_stays_inside_and_small(total: int, moves: list[str]) -> None:
    window = Window.at_end(total)
    for move in moves:
        if move != "grown" or window.end == window.total:
            window = getattr(window, move)()
        assert 0 <= window.start <= window.end <= window.total
        assert window.end - window.start <= MOST
        assert window.total == 0 or window.end > window.start


def test_both_ends_can_be_reached() -> None:
    window = Window.at_end(95)
    for _ in range(95 // STEP + 1):
        window = window.earlier()
    assert window.start == 0
    for _ in range(95 // STEP + 1):
        window = window.later()
    assert window.end == 95
