"""Untrusted text and JSON: whatever is read can be written, displayed and sent on without errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.system.foreign import DEPTH, encodable, read_json

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_a_whole_text_can_be_encoded(text: str) -> None:
    made = encodable(text)
    made.encode()
    assert encodable(made) == made
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert made == text


def test_halves_are_joined_and_lone_ones_replaced() -> None:
    assert encodable("\ud83d\ude00 \udcff-\ud83d") == "😀 \ufffd-\ufffd"


@given(
    st.recursive(
        st.none() | st.integers(-(2**70), 2**70) | ANY_TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    )
)
def test_what_is_read_can_be_sent(value: object) -> None:
    read = read_json(json.dumps(value))
    assert read_json(json.dumps(read, ensure_ascii=False).encode()) == read


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_none_become_null(text: str) -> None:
    assert read_json(f'{{"a": [{text}, 1]}}') == {"a": [None, 1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "more than 200 deep"),
        ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "more than 200 deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "more than 200 deep"),
        ("9" * 10_000, "4300 digits"),
        ("{", "Expecting"),
        (b"\xff", "utf-8"),
    ],
    ids=["endless", "just too deep", "deep objects", "digits", "half", "no UTF-8"],
)
def test_what_cannot_be_read_is_one_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_json(text)
    read_json("[" * DEPTH + "]" * DEPTH)
