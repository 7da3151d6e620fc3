"""Tools that a model may call, and its calls.

A model writes calls in the format that it was trained on (`runtime.text.call_format`), and its chat template describes
the tools in that format. If a template does not support tools, a system message describes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.text.constraint import ANY_OBJECT

OPEN, CLOSE = "<tool_call>", "</tool_call>"
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
