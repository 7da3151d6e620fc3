"""Calls whose arguments are written out between tags instead of as JSON.

Qwen3-Coder and Qwen3.5 write `<function=NAME><parameter=KEY>VALUE</parameter></function>`, GLM-4.5 writes
`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, a tag or value to a line. What a value is, a text or JSON, the
tool's schema says. The first style is called `tags` here, the second `keys`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.system.foreign import read_json
from runtime.text.constraint import COMPACT
from runtime.text.tool_calls import Tool, ToolCall

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
    found = kind.get(place) if root == "#" else None
    return found.get(name, own) if isinstance(found, Mapping) else own


def written_call(text: str, tools: Mapping[str, Tool]) -> ToolCall | None:
    """The call that a text between the tags of a call is.

    Args:
        text: The text.
        tools: The tools by name.

    Returns:
        The call; None if the text is in neither form, is not complete, or names none of the tools.
    """
    for form, argument in ((_FUNCTION, _PARAMETER), (_NAMED, _ARGUMENT)):
        match = form.fullmatch(text)
        tool = None if match is None else tools.get(match["name"].strip())
        if match is None or tool is None:
            continue
        found = list(_arguments(match["inside"], argument))
        if None not in found:
            given = {own["key"].strip(): _value(own["value"], tool, own["key"].strip()) for own in found if own}
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
