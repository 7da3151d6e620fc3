"""Calls whose arguments are written out between tags instead of as JSON.

Qwen3-Coder and Qwen3.5 write `<function=NAME><parameter=KEY>VALUE</parameter></function>`, GLM-4.5 writes
`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, a tag or value to a line. What a value is, a text or JSON, the
tool's schema says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.system.foreign import read_json
from runtime.text.tool_calls import Tool, ToolCall

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\n]+)>(?P<inside>.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*(?P<name>[^<>\s]+)(?P<inside>(?:\s*<arg_key>.*)?)\s*", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>\s*(?P<key>[^<>\n]+?)\s*</arg_key>\s*<arg_value>\n?(?P<value>.*?)\n?</arg_value>\s*", re.DOTALL
)


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
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (kind is None and isinstance(schema, Mapping) and "enum" in schema):
        return text
    try:
        return read_json(text.strip())
    except ValueError:
        return text
