"""Answers in marked parts: reasoning and calls of gpt-oss, Gemma 4, Command R7B and Apertus, written as others do.

Harmony (gpt-oss): a message is `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`: reasoning in the channel
`analysis`, what the user reads in `final` or `commentary`, and a call where the header says `to=functions.NAME`.

Gemma 4: reasoning is `<|channel>thought`, a line break, the text and `<channel|>`; a call is
`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, in which texts stand between two `<|"|>` and other values are those
of JSON with bare keys.

Command R7B, Apertus: reasoning is between two marks, calls are a list of JSON between two others; of
`{"tool_name": NAME, "parameters": {...}}` in one, of `{NAME: {...}}` in the other. Command R7B's answer has marks, too.

The parts become text between `<think>` tags, plain text, and `<tool_call>` with JSON.

Source: the documentation of openai/harmony; Gemma's documentation, prompt formatting of Gemma 4; the chat template of
Command R7B; the documentation of swiss-ai/apertus_format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from runtime.system.foreign import read_json
from runtime.text.reasoning import TAGS
from runtime.text.tool_calls import CLOSE, OPEN

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
"""Added tokens of tokenizers for answers with channels."""
CHANNELS_THOUGHT_END = "<|end|><|start|>assistant<|channel|>final<|message|>"
"""What ends reasoning there, and begins the answer."""
_TO = re.compile(r"\bto=(?:functions\.)?(\S+)")
_ANALYSIS = re.compile(r"\banalysis\b")
PAIRED_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
"""Added tokens of tokenizers for such answers."""
PAIRED_THOUGHT_END = "<channel|>"
COHERE_MARKS = (
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
APERTUS_MARKS = ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>")
"""The same of answers whose calls are lists; the second ends reasoning."""
_QUOTE = "\0"
"""Stands for the last of them while a call is read."""
_CALL = re.compile(r"\s*call:(?P<name>[^{}\s]+)\s*(?P<inside>\{.*\})\s*", re.DOTALL)
_KEY = re.compile(rf"\s*(?:{_QUOTE}([^{_QUOTE}]*){_QUOTE}|([^:,{{}}\[\]{_QUOTE}]+?))\s*:")
_TEXT = re.compile(rf"{_QUOTE}([^{_QUOTE}]*){_QUOTE}")
_PLAIN = re.compile(rf"[^,{{}}\[\]{_QUOTE}]+")
_DEEPEST = 64


class Pieces(Protocol):
    """Decodes an answer token by token; for plain text, `runtime.text.tokenizer.Detokenizer`."""

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
        ...

    def flush(self) -> str: ...


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
            return self._called_text(written)
        return f"\n{TAGS[1]}\n\n" if thought else ""

    def _called_text(self, written: str) -> str:
        """What stands between the marks of calls, as other models write it."""
        return _as_json(written)


class ListedReader(PairedReader):
    """Decodes an answer whose calls are a list. See `Pieces`.

    Args:
        marks: The tokens of `COHERE_MARKS` or `APERTUS_MARKS`.
        pieces: Makes the decoder of a part's tokens; its argument are those before.
        context: The tokens before the answer; reasoning may have begun there.
    """

    def __init__(self, marks: Sequence[int], pieces: Callable[[Sequence[int]], Pieces], context: Sequence[int]) -> None:
        super().__init__((*marks[:4], -1), pieces, context)
        self._silent = marks[4:]
        if context and context[-1] == self._begin:
            self._thought = ""

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain, maybe empty."""
        if token != self._begin and token not in self._silent:
            return super().add(token)
        before = self._take(self._pieces.flush()) + self._finished()
        self._pieces = self._make(())
        self._thought = "" if token == self._begin else None
        return before

    def _called_text(self, written: str) -> str:
        try:
            found = read_json(written)
        except ValueError:
            return written
        calls = [_listed(call) for call in (found if isinstance(found, list) else [found])]
        return "".join(f"{OPEN}{call}{CLOSE}" for call in calls) if all(calls) else written


def _listed(call: Any) -> str:
    """A call of a list in JSON as other models write it; empty if it is none."""
    if not isinstance(call, dict):
        return ""
    name, arguments = call.get("tool_name"), call.get("parameters")
    if name is None and len(call) == 1:
        ((name, arguments),) = call.items()
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _as_json(written: str) -> str:
    """A call in JSON between tags; a text that is no call stays as it is."""
    call = _CALL.fullmatch(written)
    try:
        arguments, end = _value(call["inside"], 0) if call is not None else (None, 0)
    except ValueError:
        arguments, end = None, 0
    if call is None or not isinstance(arguments, dict) or call["inside"][end:].strip():
        return written.replace(_QUOTE, '"')
    return OPEN + json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False) + CLOSE


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
