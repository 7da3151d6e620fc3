"""Tool calls: client functions that a model may call, and a parser of the calls in its answer.

A model writes calls in the format that it was trained on, and its chat template describes the tools in that format. All
common formats are JSON with a name and arguments: between tags (Hermes, Qwen, SmolLM2), after a marker (Mistral), or
alone (Llama 3). `CallReader` finds them in a streamed answer. If a model's template does not support tools, a system
message describes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import RequestError
from runtime.system.foreign import read_json
from runtime.text.constraint import ANY_OBJECT, Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = ("[TOOL_CALLS]", "<|python_tag|>")
"""Markers before calls without an end marker. Most tokenizers omit these special tokens from the text."""
BARE_KEYS = frozenset({"name", "function", "type", "id", "arguments", "parameters"})
"""First keys of an object that may be a call."""
_FIRST_KEY = re.compile(r'\s*\[?\s*\{\s*"([^"\\]*)"')
_MAYBE_KEY = re.compile(r'\s*\[?\s*(\{\s*("[^"\\]{0,40})?)?')
INSTRUCTION = """You may call functions. To call one, answer with nothing but
<tool_call>{{"name": "its name", "arguments": {{its arguments}}}}</tool_call>
The next message brings its result. Call a function only where it helps; else answer in plain words. The functions:
{tools}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    """Its name."""
    description: str = ""
    """Its description, for the model."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: ANY_OBJECT)
    """JSON schema of its arguments."""
    strict: bool = False
    """Whether arguments that may violate the schema are worse than no answer."""

    def record(self) -> dict[str, Any]:
        """The function in the format of chat templates and OpenAI's interface."""
        said = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": said}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call by the model."""

    name: str
    """The function."""
    arguments: str
    """Its arguments: a JSON object."""


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """The grammar of an answer that must call one of these tools.

    Raises:
        RequestError: a strict tool has parameters that cannot be enforced.
    """
    return Grammar.of_schema({"anyOf": [_call_schema(tool) for tool in tools]})


def _call_schema(tool: Tool) -> dict[str, Any]:
    """JSON schema of a call; keeps definitions that the parameters refer to."""
    parameters = {"type": "object", **tool.parameters}
    try:
        Grammar.of_schema(parameters)
    except RequestError as error:
        if tool.strict:
            raise RequestError(f"the parameters of {tool.name} cannot be enforced: {error}") from error
        parameters = dict(ANY_OBJECT)
    if "$defs" in parameters or "definitions" in parameters:
        # References start at the root of the tool's own schema, so it gets an id of its own to resolve them.
        parameters = {"$id": f"tool:{tool.name}", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages that describe tools, calls and results as text, for a chat template without tool support."""
    told: list[dict[str, Any]] = []
    for message in messages:
        content = str(message["content"])
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            told.append({"role": "user", "content": f"<tool_response>{content}</tool_response>"})
        elif calls:
            lines = [content] if content else []
            lines += [f"{OPEN}{json.dumps(call['function'], ensure_ascii=False)}{CLOSE}" for call in calls]
            told.append({"role": "assistant", "content": "\n".join(lines)})
        else:
            told.append(dict(message))
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool.record()["function"], ensure_ascii=False) for tool in tools)
    instruction = INSTRUCTION.format(tools=listed)
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{instruction}"
        return told
    return [{"role": "system", "content": instruction}, *told]


class CallReader:
    """Separates calls from text in a streamed answer. Text that may become a call is held back."""

    def __init__(self, names: Sequence[str], *, most: int | None = None) -> None:
        """Begin an answer.

        Args:
            names: The tools; a call of any other name is text.
            most: Most calls to parse; later ones are dropped. None: all.
        """
        self._names, self._most = frozenset(names), most
        self._held = ""
        self._begun = False  # whether text was emitted, after which bare JSON is no longer a call
        self.count = 0
        """Calls found so far."""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that is certain, and the completed calls."""
        self._held += text
        return self._take(last=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest."""
        return self._take(last=True)

    def _take(self, *, last: bool) -> tuple[str, list[ToolCall]]:
        given, calls = "", []
        for part in self._parts(last=last):
            if isinstance(part, str):
                given += part
                self._begun = self._begun or bool(part.strip())
            elif self._most is None or self.count < self._most:
                calls.append(part)
                self.count += 1
        if self.count and not given.strip():
            given = ""  # the lines between calls
        return given, calls

    def _parts(self, *, last: bool) -> Iterator[str | ToolCall]:
        """Remove and return the complete texts and calls at the beginning of the held-back text."""
        while self._held and (last or self._begun or self._held.strip()):
            if self._held.lstrip()[:1] in ("{", "[") and not self._begun and not self._marked(0):
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

    def _tagged(self, *, last: bool) -> list[str | ToolCall] | None:
        """Text up to the next tag or marker, or the call that begins with one; None if more input is needed."""
        found = [(place, mark) for mark in (OPEN, *MARKS) if (place := self._held.find(mark)) >= 0]
        if not found:
            sure = len(self._held) if last else len(self._held) - _overlap(self._held, (OPEN, *MARKS))
            return [self._cut(sure)] if sure else None
        place, mark = min(found)
        if self._held[:place].strip():
            return [self._cut(place)]
        body = place + len(mark)
        end = self._held.find(CLOSE, body) if mark == OPEN else -1
        if end < 0 and not last:
            return None
        inside = self._held[body : end if end >= 0 else len(self._held)]
        whole = self._cut(end + len(CLOSE) if end >= 0 else len(self._held))
        return list(self._calls(inside)) or [whole]

    def _bare(self, *, last: bool) -> list[str | ToolCall] | None:
        """An answer that begins as JSON: a call, or text. None if more input is needed."""
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
        if all(call is not None and call.name in self._names for call in calls):
            yield from (call for call in calls if call is not None)

    def _cut(self, count: int) -> str:
        """Remove and return the first characters of the held-back text."""
        taken, self._held = self._held[:count], self._held[count:]
        return taken


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


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the text's longest suffix that may be the beginning of a marker."""
    longest = max(map(len, marks)) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )
