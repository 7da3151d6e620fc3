"""Reasoning is separated from a streamed answer, however the stream is cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from runtime.text.reasoning import ReasoningReader, split_reasoning

texts = st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", "\n", "a", " "]), max_size=10)


@given(texts.map("".join), st.lists(st.integers(0, 40), max_size=8))
@example("<think>\nhm\n</think>\n\nyes", [3, 9, 13, 20, 22])
def test_a_stream_gives_what_the_whole_gives(text: str, places: list[int]) -> None:
    ends = sorted({*places, 0, len(text)})
    reader, thought, answer = ReasoningReader(), "", ""
    for begin, end in zip(ends, [*ends[1:], len(text)], strict=True):
        more = reader.feed(text[begin:end], last=end >= len(text) and begin == ends[-1])
        thought, answer = thought + more[0], answer + more[1]
    assert (thought, answer) == split_reasoning(text)


def test_what_can_be_no_tag_comes_at_once() -> None:
    reader = ReasoningReader()
    given = [reader.feed(piece) for piece in ("<th", "ink>\nI s", "ee </b", "</", "think>\n", "\nYes", " <think>")]
    assert given == [("", ""), ("I s", ""), ("ee </b", ""), ("", ""), ("", ""), ("", "Yes"), ("", " <think>")]
