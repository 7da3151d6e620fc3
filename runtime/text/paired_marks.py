"""Marks that open and close (Gemma 4): its reasoning and calls, written as other models write theirs.

Reasoning is `<|channel>thought`, a line break, the text and `<channel|>`; a call is
`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, in which texts stand between two `<|"|>` and other values are those
of JSON with bare keys. The parts become text between `<think>` tags, and `<tool_call>` with JSON.

Source: Gemma's documentation, prompt formatting of Gemma 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from runtime.text.channels import Pieces
from runtime.text.reasoning import TAGS
from runtime.text.tool_calls import CLOSE, OPEN

PAIRED_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
"""Added tokens of tokenizers for such answers."""
_QUOTE = "\0"
"""Stands for the last of them while a call is read."""
_CALL = re.compile(r"\s*call:(?P<name>[^{}\s]+)\s*(?P<inside>\{.*\})\s*", re.DOTALL)
_KEY = re.compile(rf"\s*(?:{_QUOTE}([^{_QUOTE}]*){_QUOTE}|([^:,{{}}\[\]{_QUOTE}]+?))\s*:")
_TEXT = re.compile(rf"{_QUOTE}([^{_QUOTE}]*){_QUOTE}")
_PLAIN = re.compile(rf"[^,{{}}\[\]{_QUOTE}]+")
_DEEPEST = 64


class PairedReader:
    """Decodes an answer with such marks. See `Pieces`.

    Args:
        marks: The tokens of `PAIRED_MARKS`.
        pieces: Makes the decoder of a part's tokens; its argument are those before.
        context: The tokens before the answer.
    """

    def __init__(self, marks: Sequence[int], pieces: Callable[[Sequence[int]], Pieces], context: Sequence[int]) -> None:
        self._begin, self._end, self._call, self._called, self._quote = marks
        self._make, self._pieces = pieces, pieces(context)
        self._header: str | None = None
        self._written: str | None = None
        self._thought: str | None = None

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
        if token == self._quote:
            return self._take(self._pieces.flush() + ('"' if self._written is None else _QUOTE))
        if token not in (self._begin, self._end, self._call, self._called):
            return self._take(self._pieces.add(token))
        before = self._take(self._pieces.flush())
        self._pieces = self._make(())
        if token == self._begin:
            self._header = ""
            return before + self._finished()
        if token == self._call:
            before += self._finished()
            self._written = ""
            return before
        return before + self._finished()

    def flush(self) -> str:
        """The held-back text, and the end of what was not ended."""
        rest, self._thought = self._take(self._pieces.flush()), None
        return rest + ("" if self._written is None else self._finished())

    def _take(self, text: str) -> str:
        """What a text adds to the part that it belongs to."""
        if self._written is not None:
            self._written += text
            return ""
        if self._header is not None:
            name, ended, text = (self._header + text).partition("\n")
            self._header = None if ended else name
            self._thought = "" if ended else None
        if self._thought is None:
            return "" if self._header is not None else text
        if not self._thought and not text.strip():
            return ""  # an empty thought is none
        begun, self._thought = self._thought, self._thought or TAGS[0]
        return text if begun else f"{TAGS[0]}\n{text.lstrip()}"

    def _finished(self) -> str:
        """What the end of a part adds."""
        thought, written = self._thought, self._written
        self._thought = self._written = None
        if written is not None:
            return _as_json(written)
        return f"\n{TAGS[1]}\n\n" if thought else ""


def _as_json(written: str) -> str:
    """A call in JSON between tags; a text that is no call stays as it is."""
    found = _CALL.fullmatch(written)
    try:
        arguments, end = _value(found["inside"], 0) if found is not None else (None, 0)
    except ValueError:
        arguments, end = None, 0
    if found is None or not isinstance(arguments, dict) or found["inside"][end:].strip():
        return written.replace(_QUOTE, '"')
    return OPEN + json.dumps({"name": found["name"], "arguments": arguments}, ensure_ascii=False) + CLOSE


def _value(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """The value at a place, and where it ends.

    Raises:
        ValueError: there is none.
    """
    at = _blank(text, at)
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if (quoted := _TEXT.match(text, at)) is not None:
        return quoted[1], quoted.end()
    if text[at : at + 1] in ("{", "["):
        return _several(text, at, depth)
    plain = _PLAIN.match(text, at)
    if plain is None:
        raise ValueError("no value")
    word = plain[0].strip()
    try:
        return json.loads(word), plain.end()
    except ValueError:
        return word, plain.end()


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    """An object or a list, and where it ends."""
    named, close = text[at] == "{", "}" if text[at] == "{" else "]"
    values: list[Any] = []
    keys: list[str] = []
    at = _blank(text, at + 1)
    while text[at : at + 1] != close:
        if named:
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("no key")
            keys.append(key[2] if key[1] is None else key[1])
            at = key.end()
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _blank(text, at)
        if text[at : at + 1] == ",":
            at = _blank(text, at + 1)
        elif text[at : at + 1] != close:
            raise ValueError("no end")
    return (dict(zip(keys, values, strict=True)) if named else values), at + 1


def _blank(text: str, at: int) -> int:
    """The first place from `at` on that is not blank."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
