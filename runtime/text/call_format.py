"""Call formats: how a model writes tool calls, read off its chat template.

A template that supports tools writes an assistant's earlier calls the way the model was trained to write its own. So a
conversation with a made-up call is rendered, and what stands before, between and behind the JSON is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError
from runtime.text.tool_calls import CLOSE, OPEN

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages with tools by a chat template."""
_NAMES = ("probe_call_one", "probe_call_two")
_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])?([ \n]*\[?[ \n]*)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """What stands around the JSON of calls, and the name of the arguments in it."""

    mark: str = ""
    """The marker before the first call; empty where calls are bare JSON."""
    begin: str = ""
    """What follows the marker, up to the first call."""
    between: str = ""
    """What stands between two calls; empty where an answer has only one."""
    end: str = ""
    """What follows the last call."""
    arguments: str = "arguments"
    """The key of the arguments."""

    @classmethod
    def of_template(cls, render: Render) -> CallFormat | None:
        """Read the format off a template that supports tools; None if its calls are not JSON."""
        try:
            one = _rendered(render, 1)
            prompt = render([_ASKED], [_tool(_NAMES[0])])
        except RequestError:
            return None
        place = _call_at(one, _NAMES[0])
        if place is None:
            return None
        start, stop, key = place
        before = _MARK.search(one[:start])
        assert before is not None, "it may be empty"
        mark, begin = before[1] or "", before[2]
        if mark and prompt.rstrip().endswith(mark):  # the end of the prompt, not the beginning of calls
            mark, begin = "", begin.lstrip()
        closing = [re.escape(f"{sign}/{mark.removeprefix(sign)}") for sign in ("<|", "<") if mark.startswith(sign)]
        after = re.compile(rf"[ \n]*\]?[ \n]*({'|'.join(closing)})?" if closing else r"[ \n]*\]?").match(one, stop)
        end = after[0].rstrip(" \n") if after is not None else ""
        return cls(mark=mark, begin=begin, between=_between(render), end=end, arguments=key)


TOLD = CallFormat(mark=OPEN, between=f"{CLOSE}\n{OPEN}", end=CLOSE)
"""The format of `runtime.text.tool_calls.INSTRUCTION`, for models whose template does not support tools."""
_ASKED = {"role": "user", "content": "Please."}


def _rendered(render: Render, count: int) -> str:
    calls = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": {"x": at}}}
        for at, name in enumerate(_NAMES[:count])
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return render([_ASKED, answer], [_tool(name) for name in _NAMES])


def _tool(name: str) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "Tries.", "parameters": parameters}}


def _call_at(text: str, name: str) -> tuple[int, int, str] | None:
    """Where the JSON of a call begins and ends, and the key of its arguments."""
    place = text.rfind(f'"{name}"')
    start = text.rfind("{", 0, max(0, place))
    if place < 0 or start < 0:
        return None
    try:
        call, length = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return None
    keys = [key for key in ("arguments", "parameters") if isinstance(call.get(key), dict) and "x" in call[key]]
    return (start, start + length, keys[0]) if keys and call.get("name") == name else None


def _between(render: Render) -> str:
    """What stands between two calls; empty if the template allows only one."""
    try:
        both = _rendered(render, 2)
    except RequestError:
        return ""
    first, second = _call_at(both, _NAMES[0]), _call_at(both, _NAMES[1])
    return both[first[1] : second[0]] if first is not None and second is not None and first[1] < second[0] else ""
