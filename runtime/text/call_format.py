"""Call formats: how a model writes tool calls, read off its chat template.

A template that supports tools writes an assistant's earlier calls the way the model was trained to write its own. So a
conversation with a made-up call is rendered, and what stands before, between and behind the call is the format. The
call itself is JSON, or its arguments are written out in one of two styles (`runtime.text.written_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from runtime.errors import RequestError
from runtime.text.tool_calls import CLOSE, OPEN

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages with tools by a chat template."""
Style = Literal["json", "tags", "keys"]
"""JSON; or arguments written out, each in a tag of its name (Qwen3.5), or as a key and a value (GLM-4.5)."""
_NAMES = ("probe_call_one", "probe_call_two")
_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])?([ \n]*\[?[ \n]*)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """What stands around calls, and how they are written."""

    mark: str = ""
    """The marker before the first call; empty where calls are bare JSON."""
    begin: str = ""
    """What follows the marker, up to the first call."""
    between: str = ""
    """What stands between two calls; empty where an answer has only one."""
    end: str = ""
    """What follows the last call."""
    arguments: str = "arguments"
    """The key of the arguments in JSON."""
    style: Style = "json"
    """How a call is written."""

    @classmethod
    def of_template(cls, render: Render) -> CallFormat | None:
        """Read the format off a template that supports tools; None if its calls have none of the styles."""
        try:
            one = _rendered(render, 1)
            prompt = render([_ASKED], [_tool(_NAMES[0])])
        except RequestError:
            return None
        place = _call_at(one, _NAMES[0])
        if place is None:
            return None
        start, stop, key, style = place
        before = _MARK.search(one[:start])
        assert before is not None, "it may be empty"
        mark, begin = before[1] or "", before[2]
        if mark and prompt.rstrip().endswith(mark):  # the end of the prompt, not the beginning of calls
            mark, begin = "", begin.lstrip()
        closing = [re.escape(f"{sign}/{mark.removeprefix(sign)}") for sign in ("<|", "<") if mark.startswith(sign)]
        after = re.compile(rf"[ \n]*\]?[ \n]*({'|'.join(closing)})?" if closing else r"[ \n]*\]?").match(one, stop)
        end = after[0].rstrip(" \n") if after is not None else ""
        return cls(mark=mark, begin=begin, between=_between(render), end=end, arguments=key, style=style)


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


class _Place(NamedTuple):
    """A call in a rendered conversation."""

    start: int
    stop: int
    key: str = "arguments"
    """That of its arguments in JSON."""
    style: Style = "json"


_WRITTEN: Mapping[Style, str] = {
    "tags": r"<function={name}>\n<parameter=x>\n\d\n</parameter>\n</function>",
    "keys": r"{name}\n<arg_key>x</arg_key>\n<arg_value>\d</arg_value>",
}
"""The made-up call by style."""


def _call_at(text: str, name: str) -> _Place | None:
    """The call of a function; None if it has none of the styles."""
    for style, written in _WRITTEN.items():
        if (found := re.search(written.format(name=name), text)) is not None:
            return _Place(found.start(), found.end(), style=style)
    place = text.rfind(f'"{name}"')
    start = text.rfind("{", 0, max(0, place))
    if place < 0 or start < 0:
        return None
    try:
        call, length = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return None
    keys = [key for key in ("arguments", "parameters") if isinstance(call.get(key), dict) and "x" in call[key]]
    return _Place(start, start + length, keys[0]) if keys and call.get("name") == name else None


def _between(render: Render) -> str:
    """What stands between two calls; empty if the template allows only one."""
    try:
        both = _rendered(render, 2)
    except RequestError:
        return ""
    first, second = _call_at(both, _NAMES[0]), _call_at(both, _NAMES[1])
    return both[first.stop : second.start] if first and second and first.stop < second.start else ""
