"""Channels of gpt-oss (Harmony): its reasoning, answers and calls, written as other models write theirs.

A message is `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`: reasoning in the channel `analysis`, what the
user reads in `final` or `commentary`, and a call where the header says `to=functions.NAME`. The parts become text
between `<think>` tags, plain text, and `<tool_call>` with JSON.

Source: the documentation of openai/harmony.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.text.reasoning import TAGS
from runtime.text.tool_calls import CLOSE, OPEN

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Added tokens of tokenizers for answers with channels."""
_TO = re.compile(r"\bto=(?:functions\.)?(\S+)")
_ANALYSIS = re.compile(r"\banalysis\b")


class Pieces(Protocol):
    """Decodes an answer token by token; for plain text, `runtime.text.tokenizer.Detokenizer`."""

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
        ...

    def flush(self) -> str:
        """The held-back text."""
        ...


class ChannelReader:
    """Decodes an answer with channels. See `Pieces`.

    Args:
        marks: The tokens of `CHANNEL_MARKS`.
        pieces: Makes the decoder of a part's tokens; its argument are those before.
        context: The tokens before the answer.
    """

    def __init__(self, marks: Sequence[int], pieces: Callable[[Sequence[int]], Pieces], context: Sequence[int]) -> None:
        self._start, self._channel, self._message, self._end = marks
        self._make = pieces
        self._pieces = pieces(context)
        self._header: str | None = None
        self._thinks = self._speaks = self._calls = False

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
        if token == self._message:
            whole = (self._header or "") + self._pieces.flush()
            self._header, self._pieces = None, self._make(())
            return self._opening(whole)
        if token in (self._start, self._channel, self._end):
            rest, header = self._pieces.flush(), self._header
            self._pieces = self._make(())
            if header is not None:
                self._header = f"{header}{rest} "
                return ""
            self._header = ""
            return rest + self._closing()
        text = self._pieces.add(token)
        if self._header is None:
            return text
        self._header += text
        return ""

    def flush(self) -> str:
        """The held-back text, and the end of what was not ended."""
        rest = self._pieces.flush()
        return ("" if self._header is not None else rest) + self._closing()

    def _closing(self) -> str:
        """What a call ends with; nothing if none is open."""
        called, self._calls = self._calls, False
        return "}" + CLOSE if called else ""

    def _opening(self, header: str) -> str:
        """What a part begins with."""
        call = _TO.search(header)
        if call is None and _ANALYSIS.search(header):
            begun, self._thinks = self._thinks, True
            return "\n\n" if begun else f"{TAGS[0]}\n"
        ended = f"\n{TAGS[1]}\n\n" if self._thinks else "\n\n" if self._speaks else ""
        self._thinks, self._speaks, self._calls = False, True, call is not None
        if call is None:
            return ended
        return f'{ended}{OPEN}{{"name": {json.dumps(call[1])}, "arguments": '
