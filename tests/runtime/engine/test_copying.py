"""Copied drafts: the index finds what a search finds, and drafts are made where they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drafting import LARGEST_GAMMA
from runtime.engine import copying as suffix_index
from runtime.engine.copying import NGRAM, Copies, StepTimes, SuffixIndex

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


def times_of(*, four: float = 1.4, eight: float = 2.0, sixteen: float = 3.5) -> StepTimes:
    """What steps take once they were seen often."""
    times = StepTimes()
    for _ in range(40):
        for rows, ratio in ((1, 1.0), (4, four), (8, eight), (16, sixteen)):
            times.note(rows, ratio)
    return times


def drafted(copies: Copies, text: list[int]) -> list[tuple[int, int]]:
    """For each draft, as an answer goes on as `text`: how many tokens it had, and how many of them stayed."""
    found, at = [], 0
    while at < len(text):
        draft = copies.draft(len(text) - at)
        stayed = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
        if draft:
            found.append((len(draft), stayed))
        for token in text[at : at + stayed + 1]:
            copies.note(token)
        at += stayed + 1
    return found


def test_a_copy_is_drafted_in_long_pieces() -> None:
    text = list(range(200))
    rounds = drafted(Copies(text, times_of(), ()), text)
    assert all(stayed == count for count, stayed in rounds)
    assert sum(count + 1 for count, _ in rounds) > 190, "no more than a few tokens were decoded one by one"
    assert max(count for count, _ in rounds) == LARGEST_GAMMA
    assert len(rounds) < 20


def test_where_nothing_stays_drafts_end_within_a_few() -> None:
    """Words that come again and again, in an order that says nothing of the next."""
    random = np.random.default_rng(0)
    text = random.integers(0, 6, 600).tolist()
    copies = Copies(text[:300], StepTimes(), ())
    assert len(drafted(copies, text[300:])) <= 6
    assert len(drafted(copies, random.integers(0, 6, 900).tolist())) <= 15, "by chance, some seem to stay"


def test_a_text_without_repetition_is_left_alone() -> None:
    copies = Copies(range(100), times_of(), ())
    assert not drafted(copies, list(range(100, 300)))


def test_a_copy_that_begins_late_is_noticed() -> None:
    """Though before it nothing stayed for long: what is not drafted is watched."""
    random = np.random.default_rng(1)
    copied = list(range(100, 200))
    copies = Copies([*copied, *random.integers(0, 5, 300).tolist()], StepTimes(), ())
    drafted(copies, random.integers(0, 5, 300).tolist())
    rounds = drafted(copies, copied)
    assert sum(stayed for _, stayed in rounds) > 70


def test_steps_that_take_too_long_are_not_made() -> None:
    text = list(range(100))
    slow = times_of(four=4.5, eight=9.0, sixteen=18.0)
    assert not drafted(Copies(text, slow, ()), text)
    only_four = times_of(eight=9.0, sixteen=18.0)
    assert max(count for count, _ in drafted(Copies(text, only_four, ()), text)) == 3


def test_what_took_too_long_is_tried_again_much_later() -> None:
    slow = times_of(four=4.5, eight=9.0, sixteen=18.0)
    for _ in range(200):
        slow.note(1, 1.0)
    assert slow.ratio(4) > 2.5
    for _ in range(2000):
        slow.note(1, 1.0)
    assert slow.ratio(4) == pytest.approx(StepTimes().ratio(4), rel=0.05)


def test_steps_of_a_tiny_model_are_too_short() -> None:
    times = StepTimes()
    assert not times.short, "nothing is known yet"
    times.note(1, 1e-4)
    assert times.short
    for _ in range(60):
        times.note(1, 1e-3)
    assert not times.short


def test_one_step_that_was_held_up_says_little() -> None:
    times = times_of()
    times.note(4, 1000.0)
    assert times.ratio(4) < 2.2
    times.note(1, 1000.0)
    times.note(8, 2.0)
    assert times.ratio(8) == pytest.approx(2.0, rel=0.1)


def test_with_others_beside_a_draft_must_pay_for_all() -> None:
    """What it adds to everybody's step counts against what one answer gains."""
    text = list(range(100))
    copies = Copies(text, times_of(four=1.4, eight=2.4, sixteen=4.4), ())
    drafted(copies, text[:70])
    assert [len(copies.draft(most, concurrent)) for concurrent, most in ((1, 15), (2, 7), (4, 3))] == [15, 6, 0]
    assert copies.draft(15, 1, others=9.0) == [], "what else drafts promises more"


def test_nothing_is_copied_behind_an_end_or_beyond_what_is_wanted() -> None:
    text = list(range(50))
    copies = Copies([*text, *text[:20]], times_of(), (24,))
    assert copies.draft(15) == [20, 21, 22, 23, 24]
    assert copies.draft(2) == [20, 21]
    assert copies.draft(0) == []
