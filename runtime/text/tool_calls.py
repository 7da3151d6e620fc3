"""Tools that a model may call, its calls, and the formats in which models write them.

A template that supports tools writes an assistant's earlier calls the way the model was trained to write its own. So a
conversation with a made-up call is rendered, and what stands before, between and behind the call is the format. The
call itself is JSON, or its arguments are written out in one of two styles. If a template does not support tools, a
system message describes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from runtime.errors import RequestError
from runtime.system.foreign import read_json
from runtime.text.constraint import ANY_OBJECT, COMPACT

OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTION = """You may call functions. To call one, answer with nothing but
<tool_call>{{"name": "its name", "arguments": {{its arguments}}}}</tool_call>
The next message brings its result. Call a function only where it helps; else answer in plain words. The functions:
{tools}"""
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""Renders messages with tools by a chat template."""
Style = Literal["json", "tags", "keys"]
"""JSON; or arguments written out, each in a tag of its name (Qwen3.5), or as a key and a value (GLM-4.5)."""
_NAMES = ("probe_call_one", "probe_call_two")
_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])?([ \n]*\[?[ \n]*)\Z")
_ASKED = {"role": "user", "content": "Please."}
_WRITTEN: Mapping[Style, str] = {
    "tags": r"<function={name}>\n<parameter=x>\n\d\n</parameter>\n</function>",
    "keys": r"{name}\n<arg_key>x</arg_key>\n<arg_value>\d</arg_value>",
}
"""The made-up call by style."""
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\n]+)>(?P<inside>.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*(?P<name>[^<>\s]+)(?P<inside>(?:\s*<arg_key>.*)?)\s*", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>\s*(?P<key>[^<>\n]+?)\s*</arg_key>\s*<arg_value>\n?(?P<value>.*?)\n?</arg_value>\s*", re.DOTALL
)
_AROUND: Mapping[str, tuple[str, str, str, str]] = {
    "tags": ("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>"),
    "keys": ("{name}", "\n<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>", ""),
}
"""What begins a call, what begins and ends an argument, and what ends the call, by style."""
ENDS = {style: around[2] for style, around in _AROUND.items()}
"""What ends an argument, by style."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
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
    arguments: str
    """Its arguments: a JSON object."""


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


def written_rules(tools: Sequence[Tool], arguments: Sequence[Mapping[str, Any]], style: str) -> Iterator[str]:
    """Rules in Lark of a `call` of one of the tools, whose arguments stand in the schema's order.

    Texts are free but for their end, and values of other kinds are JSON by their schema. What the schema lists as
    required has to be there.

    Args:
        tools: The tools.
        arguments: The enforceable schema of each; of one without properties, any arguments are allowed.
        style: `tags` or `keys`.
    """
    head, begin, end, tail = _AROUND[style]
    first, _, last = begin.partition("{key}")
    yield "call: " + " | ".join(f"call_{n}" for n in range(len(tools)))
    yield f"text[lazy]: WORDS {json.dumps(end)}"
    yield f"any: {json.dumps(first)} KEY {json.dumps(last)} text"
    yield "WORDS: /(.|\\n)*/"
    yield "KEY: /[A-Za-z0-9_.-]{1,64}/"
    for n, (tool, kind) in enumerate(zip(tools, arguments, strict=True)):
        properties, required = kind.get("properties"), kind.get("required") or ()
        known = properties if isinstance(properties, Mapping) and properties else None
        names = [f"arg_{n}_{m}" for m in range(len(known or ()))]
        parts = (
            ["any*"]
            if known is None
            else [name if key in required else f"{name}?" for name, key in zip(names, known, strict=True)]
        )
        closed = json.dumps(tail) if tail else ""
        yield f"call_{n}: {json.dumps(head.format(name=tool.name))} {' '.join(parts)} {closed}"
        for name, (key, own) in zip(names, (known or {}).items(), strict=True):
            yield from _argument(name, json.dumps(begin.format(key=key)), json.dumps(end), _resolved(own, kind), kind)


def _argument(name: str, begin: str, end: str, own: Any, kind: Mapping[str, Any]) -> Iterator[str]:
    """The rules of an argument."""
    listed = own.get("enum", [own["const"]] if "const" in own else []) if isinstance(own, Mapping) else []
    if listed and all(isinstance(one, str) for one in listed):
        yield f"{name}: {begin} ({' | '.join(map(json.dumps, listed))}) {end}"
    elif isinstance(own, Mapping) and own.get("type") == "string":
        yield f"{name}: {begin} text"
    else:
        definitions = {key: kind[key] for key in ("$defs", "definitions") if key in kind}
        yield f"{name}: {begin} value_{name} {end}"
        schema = {**(own if isinstance(own, Mapping) else {}), **definitions, "x-guidance": COMPACT}
        yield f"value_{name}: %json {json.dumps(schema)}"


def _resolved(own: Any, kind: Mapping[str, Any]) -> Any:
    """A property's schema; one that only refers to a definition of the tool's is that."""
    reference = own.get("$ref") if isinstance(own, Mapping) else None
    if not isinstance(reference, str) or reference.count("/") != 2:
        return own
    root, place, name = reference.split("/")
    schema = kind.get(place) if root == "#" else None
    return schema.get(name, own) if isinstance(schema, Mapping) else own


def written_call(text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
    """The call that a text between the tags of a call is.

    Returns:
        The call; None if the text is in neither form, is not complete, or names none of the tools.
    """
    for form, argument in ((_FUNCTION, _PARAMETER), (_NAMED, _ARGUMENT)):
        match = form.fullmatch(text)
        tool = None if match is None else tools.get(match["name"].strip())
        if match is None or tool is None:
            continue
        arguments = list(_arguments(match["inside"], argument))
        if None not in arguments:
            given = {own["key"].strip(): _value(own["value"], tool, own["key"].strip()) for own in arguments if own}
            return ToolCall(name=tool.name, arguments=json.dumps(given, ensure_ascii=False))
    return None


def _arguments(text: str, argument: re.Pattern[str]) -> Iterator[re.Match[str] | None]:
    """The arguments one behind another; None for what is none."""
    at = 0
    while text[at:].strip():
        match = argument.match(text, at)
        yield match
        if match is None:
            return
        at = match.end()


def _value(text: str, tool: Tool, key: str) -> Any:
    """A value by the kind that the schema names: a text as it stands, all else as JSON if it is any."""
    properties = tool.parameters.get("properties")
    own = _resolved(properties.get(key), tool.parameters) if isinstance(properties, Mapping) else None
    kind = own.get("type") if isinstance(own, Mapping) else None
    if kind == "string" or (kind is None and isinstance(own, Mapping) and ("enum" in own or "const" in own)):
        return text
    try:
        return read_json(text.strip())
    except ValueError:
        return text
