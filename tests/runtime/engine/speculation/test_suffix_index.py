"""The suffix index against a search through the whole sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.speculation import suffix_index
from runtime.engine.speculation.suffix_index import NGRAM, SuffixIndex

FEW = st.lists(st.integers(0, 2), max_size=60)


def longest(tokens: list[int], candidates: int | None = None) -> tuple[int, set[int]]:
    """The length of the longest earlier match of the end, and the ends of all such matches; (0, none) under `NGRAM`."""
    end, lengths = len(tokens), dict[int, int]()
    for at in range(end - 1, NGRAM - 1, -1):
        length = 0
        while length < at and tokens[at - length - 1] == tokens[end - length - 1]:
            length += 1
        if length >= NGRAM:
            lengths[at] = length
    ends = list(lengths)[:candidates]
    most = max((lengths[at] for at in ends), default=0)
    return most, {at for at in ends if lengths[at] == most}


@given(first=FEW, more=FEW)
def test_the_longest_match_is_found(first: list[int], more: list[int]) -> None:
    tokens, index = list(first), SuffixIndex(first)
    for token in [None, *more]:
        if token is not None:
            tokens.append(token)
            index.append(token)
        at_least, _ = longest(tokens, suffix_index.CANDIDATES)
        most, _ = longest(tokens)
        assert at_least <= index.length <= most
        if index.length:
            assert index.next() == tokens[index._at]
            assert tokens[index._at - index.length : index._at] == tokens[len(tokens) - index.length :]


@given(tokens=FEW)
def test_with_candidates_enough_it_is_the_longest_of_all(tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_index, "CANDIDATES", 100)
        grown = SuffixIndex(())
        for token in tokens:
            grown.append(token)
        for index in (grown, SuffixIndex(tokens)):
            most, ends = longest(tokens)
            assert index.length == most
            assert not most or index._at in ends


def test_what_follows_goes_on_periodically() -> None:
    index = SuffixIndex([1, 2, 3, 4, 9, 1, 2, 3])
    assert (index.length, index.next()) == (3, 4)
    assert index.continuation(3) == [4, 9, 1]
    assert index.continuation(7) == [4, 9, 1, 2, 3, 4, 9]
    assert SuffixIndex([7, 7, 7, 7]).continuation(3) == [7, 7, 7]


def test_the_latest_of_equal_places_is_taken() -> None:
    index = SuffixIndex([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    assert index.next() == 5
    longer = SuffixIndex([0, 1, 2, 3, 4, 1, 2, 3, 5, 0, 1, 2, 3])
    assert (longer.length, longer.next()) == (4, 4)


def test_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches are compared up to a length, and grow beyond it as the sequence repeats on."""
    monkeypatch.setattr(suffix_index, "LONGEST", 5)
    text = list(range(20))
    index = SuffixIndex([*text, *text[:10]])
    assert index.length == 5
    index.append(10)
    assert (index.length, index.next()) == (6, 11)
