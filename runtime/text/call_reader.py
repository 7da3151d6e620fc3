"""Call reader: finds tool calls in a streamed answer.

Most formats are JSON with a name and arguments: between tags (Hermes, Qwen, SmolLM2), after a marker (Mistral,
Granite), or alone (Llama 3). Between tags, arguments may also be written out (Qwen3.5, GLM-4.5; see
`runtime.text.tool_calls`). Text that may become a call is held back. The arguments of a call that a grammar enforces
are passed on as they are written, since they cannot turn out to be something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.system.foreign import read_json
from runtime.text.tool_calls import CLOSE, OPEN, Tool, ToolCall, written_call

MARKS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
"""Markers before calls without an end marker. Most tokenizers omit these special tokens from the text."""
BARE_KEYS = frozenset({"name", "function", "type", "id", "arguments", "parameters"})
"""First keys of an object that may be a call."""
_FIRST_KEY = re.compile(r'\s*\[?\s*\{\s*"([^"\\]*)"')
_MAYBE_KEY = re.compile(r'\s*\[?\s*(\{\s*("[^"\\]{0,40})?)?')
_HEAD = re.compile(r'[\s,\[]*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_TAIL = re.compile(r"[\s}\]]*")


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call whose arguments are still being written."""

    arguments: str
    """More of the arguments' JSON."""
    name: str | None = None
    """The function, in the first piece of a call only."""


Found = ToolCall | CallPart


class CallReader:
    """Separates calls from text in a streamed answer. Text that may become a call is held back."""

    def __init__(self, tools: Sequence[Tool], *, most: int | None = None, enforced: Collection[str] = ()) -> None:
        """Begin an answer.

        Args:
            tools: The tools; a call of any other is text.
            most: Most calls to parse; later ones are dropped. None: all.
            enforced: The tools whose calls a grammar enforces to the last letter; their arguments are streamed.
        """
        self._tools, self._most, self._enforced = {tool.name: tool for tool in tools}, most, frozenset(enforced)
        self._held = ""
        self._arguments: _Object | None = None  # of the call that is being streamed
        self._behind = False  # whether a streamed call has just ended
        self._begun = False  # whether text was emitted, after which bare JSON is no longer a call
        self.count = 0
        """Calls found so far."""

    @property
    def holds(self) -> bool:
        """Whether text is held back that may become a call."""
        return bool(self._held) or self._arguments is not None

    def feed(self, text: str) -> tuple[str, list[Found]]:
        """Add a piece. Returns the text that is certain, and the calls that it completes or continues."""
        self._held += text
        return self._take(last=False)

    def finish(self) -> tuple[str, list[Found]]:
        return self._take(last=True)

    def _take(self, *, last: bool) -> tuple[str, list[Found]]:
        given, calls = "", list[Found]()
        for part in self._parts(last=last):
            if isinstance(part, str):
                given += part
                self._begun = self._begun or bool(part.strip())
            elif isinstance(part, CallPart) and part.name is None:
                calls.append(part)
            elif self._most is None or self.count < self._most:
                calls.append(part)
                self.count += 1
        if self.count and not given.strip():
            given = ""  # the lines between calls
        return given, calls

    def _parts(self, *, last: bool) -> Iterator[str | Found]:
        """Remove and return the complete texts and calls at the beginning of the held-back text."""
        while self._held and (last or self._begun or self._held.strip()):
            if self._arguments is not None or self._behind:
                taken = self._streamed(last=last)
            elif self._held.lstrip()[:1] in ("{", "[") and not self._begun and not self._marked(0):
                taken = self._bare(last=last)
            else:
                taken = self._tagged(last=last)
            if taken is None:
                return
            yield from taken

    def _marked(self, at: int) -> bool:
        """Whether a tag or marker, or a possible beginning of one, is at the first non-space character."""
        rest = self._held[at:].lstrip()
        return (
            any(rest.startswith(mark) or mark.startswith(rest) for mark in (OPEN, *MARKS)) if len(rest) > 1 else False
        )

    def _streamed(self, *, last: bool) -> list[str | Found] | None:
        """More of the arguments of a streamed call, or what follows them; None if more input is needed."""
        if self._arguments is not None:
            given = self._cut(self._arguments.read(self._held))
            if self._arguments.ended:
                self._arguments, self._behind = None, True
            return [CallPart(given)]
        behind = _TAIL.match(self._held)
        assert behind is not None, "it may be empty"
        rest = self._held[behind.end() :]
        if (begun := self._stream(0)) is not None:
            return begun
        if rest.startswith(CLOSE):
            self._cut(behind.end() + len(CLOSE))
        elif rest and not CLOSE.startswith(rest) and not rest.startswith(","):
            self._cut(behind.end())
        elif not last:
            return None
        else:
            self._cut(len(self._held))
        self._behind = False
        return []

    def _stream(self, body: int) -> list[str | Found] | None:
        """Begin to stream the call whose JSON begins at a place of the held-back text, if its name is complete."""
        head = _HEAD.match(self._held, body)
        if head is None or head[1] not in self._enforced or (self._most is not None and self.count >= self._most):
            return None
        self._cut(head.end())
        self._arguments, self._behind = _Object(), False
        return [CallPart("", head[1])]

    def _tagged(self, *, last: bool) -> list[str | Found] | None:
        """Text up to the next tag or marker, or the call that begins with one; None if more input is needed."""
        marks = [(place, mark) for mark in (OPEN, *MARKS) if (place := self._held.find(mark)) >= 0]
        if not marks:
            sure = len(self._held) if last else len(self._held) - _overlap(self._held)
            return [self._cut(sure)] if sure else None
        place, mark = min(marks)
        if self._held[:place].strip():
            return [self._cut(place)]
        body = place + len(mark)
        if (begun := self._stream(body)) is not None:
            return begun
        end = self._close(body) if mark == OPEN else -1
        if end < 0 and not last:
            return None
        inside = self._held[body : end if end >= 0 else len(self._held)]
        whole = self._cut(end + len(CLOSE) if end >= 0 else len(self._held))
        written = written_call(inside, self._tools) if end >= 0 or last else None
        return [written] if written is not None else list(self._calls(inside)) or [whole]

    def _close(self, body: int) -> int:
        """Where the closing tag of a call is; -1 if there is none yet. In a text of its JSON it is a text."""
        end, json_like = self._held.find(CLOSE, body), self._held[body:].lstrip()[:1] in ("{", "[")
        while json_like and end >= 0 and len(_QUOTED.sub("", self._held[body:end]).split('"')) > 1:
            end = self._held.find(CLOSE, end + 1)
        return end

    def _bare(self, *, last: bool) -> list[str | Found] | None:
        """An answer that begins as JSON: a call, or text. None if more input is needed."""
        if (begun := self._stream(0)) is not None:
            return begun
        key = _FIRST_KEY.match(self._held)
        possible = key[1] in BARE_KEYS if key else bool(_MAYBE_KEY.fullmatch(self._held))
        if possible and not last:
            try:
                _, end = json.JSONDecoder().raw_decode(self._held.lstrip())
            except RecursionError:  # too deeply nested for a call
                possible, end = False, 0
            except ValueError:
                return None
            end += len(self._held) - len(self._held.lstrip())
        else:
            end = len(self._held)
        calls = list(self._calls(self._held[:end])) if possible else []
        if calls:
            self._cut(end)
            return list(calls)
        self._begun = True
        return []

    def _calls(self, text: str) -> Iterator[ToolCall]:
        """The calls in a JSON text; none if any of them is not a call of a known tool."""
        try:
            data = read_json(text)
        except ValueError:
            return
        calls = [_call(item) for item in (data if isinstance(data, list) else [data])]
        if all(call is not None and call.name in self._tools for call in calls):
            yield from (call for call in calls if call is not None)

    def _cut(self, count: int) -> str:
        """Remove and return the first characters of the held-back text."""
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class _Object:
    """Follows a JSON object to its end."""

    def __init__(self) -> None:
        self._depth, self._text, self._escaped = 0, False, False
        self.ended = False
        """Whether its last brace was read."""

    def read(self, text: str) -> int:
        """Read on. Returns how many characters belong to the object."""
        for at, letter in enumerate(text):
            if self._text:
                self._text = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return at + 1
        return len(text)


def _call(data: Any) -> ToolCall | None:
    """Parse a call in any of the common formats; None if it is not one."""
    if isinstance(data, dict) and isinstance(data.get("function"), dict):
        data = data["function"]
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=data["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """Length of the text's longest suffix that may be the beginning of a marker."""
    marks = (OPEN, *MARKS)
    longest = max(map(len, marks)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)
