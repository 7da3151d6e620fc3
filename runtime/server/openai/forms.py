"""Validation of a request's tools and answer format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from runtime.errors import RequestError
from runtime.server.errors import ApiError
from runtime.server.reading import Items, JsonObject
from runtime.system.foreign import read_json
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import ANY_OBJECT, Grammar
from runtime.text.tool_calls import Tool

MAX_TOOLS = 128
"""Most tools per request, as in OpenAI's interface."""
MAX_GRAMMAR = 2**14
"""Most characters of `structured_outputs.grammar`: nested terminals take cubic time."""
MAX_CHOICES = 1000
"""Most texts of `structured_outputs.choice`."""

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Choice = Annotated[str, Field(min_length=1)]
CallId = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class FunctionSpec(_Part):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None

    def tool(self) -> Tool:
        """Convert to the program's own type."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters if self.parameters is not None else {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class ToolSpec(_Part):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(_Part):
    """A function by its name."""

    name: FunctionName


class NamedTool(_Part):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(_Part):
    """The function of a call in an assistant's message."""

    name: FunctionName
    arguments: str


class CalledTool(_Part):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def record(self, where: str) -> dict[str, Any]:
        """Convert to the format of chat templates, with arguments as an object.

        Raises:
            ApiError: the arguments are no JSON object.
        """
        try:
            arguments = read_json(self.function.arguments or "{}")
        except ValueError as error:
            raise ApiError(400, f"{where}.function.arguments is not JSON: {error}", param=where) from None
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{where}.function.arguments is not a JSON object", param=where)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class SchemaFormat(_Part):
    """A JSON schema with its name."""

    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    name: str | None = None
    strict: StrictBool | None = None


class ResponseFormat(_Part):
    """Answer format, as in OpenAI's interface."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        """The grammar that enforces it.

        Raises:
            RequestError: there is no schema, or it cannot be enforced.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar.of_schema(ANY_OBJECT)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("its schema is missing: give the JSON schema of the answer")
        return Grammar.of_schema(self.json_schema.schema_)


class StructuredOutputs(_Part):
    """Answer format, as in vLLM's interface: exactly one of these."""

    json_: Annotated[JsonObject | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[Items[Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar", max_length=MAX_GRAMMAR)] = None

    def grammar(self) -> Grammar:
        """The grammar that enforces it.

        Raises:
            ApiError: none is given, or several.
            RequestError: it cannot be enforced.
        """
        given = [value for value in (self.json_, self.regex, self.choice, self.grammar_) if value is not None]
        if len(given) != 1:
            raise ApiError(
                400, "structured_outputs takes one of json, regex, choice and grammar", param="structured_outputs"
            )
        if self.json_ is not None:
            return Grammar.of_schema(self.json_)
        if self.regex is not None:
            return Grammar.of_regex(self.regex)
        if self.choice is not None:
            return Grammar.of_lark("start: " + " | ".join(json.dumps(text) for text in self.choice))
        assert self.grammar_ is not None
        return Grammar.of_lark(self.grammar_)


class AnswerForm(TypedDict, total=False):
    """Fields of `SamplingOptions`: at most one of them."""

    grammar: Grammar | None
    calls: CallRules


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request allows."""

    tools: Sequence[Tool]
    """The tools to present to the model."""
    required: bool = False
    """Whether it must call one."""
    several: bool = True
    """Whether it may call several."""


def answer_form(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    choice: ToolUse | None = None,
    *,
    named: str = "response_format",
) -> AnswerForm:
    """The form of an answer.

    Args:
        response_format: The answer format in OpenAI's interface.
        structured: The answer format in vLLM's interface.
        choice: The tools that may be called.
        named: The request's name for its `response_format`.

    Raises:
        ApiError: the fields contradict each other, or one cannot be enforced; names the field.
    """
    asked = {
        named: response_format if response_format is not None and response_format.type != "text" else None,
        "structured_outputs": structured,
        "tools": choice if choice is not None and choice.required else None,
    }
    fields = [field for field, wish in asked.items() if wish is not None]
    if len(fields) > 1:
        raise ApiError(400, f"{' and '.join(fields)} both decide the form of the answer: give one", param=fields[1])
    field = fields[0] if fields else "tools"
    try:
        if asked[named] is not None and response_format is not None:
            return {"grammar": response_format.grammar()}
        if structured is not None:
            return {"grammar": structured.grammar()}
        if choice is None or not choice.tools:
            return {}
        return {"calls": CallRules.of(choice.tools, required=choice.required, several=choice.several)}
    except RequestError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from error


def chosen_tools(tools: Sequence[ToolSpec] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """The tools to present to the model, and whether it must call one, or may call several.

    Raises:
        ApiError: two tools have one name, or the choice is not among them.
    """
    known = [spec.function.tool() for spec in tools or ()]
    names = [tool.name for tool in known]
    several = parallel is not False
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"tools holds the function {twice} twice", param="tools")
    if choice == "none":
        return ToolUse(())
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise ApiError(400, f"tool_choice names {wanted}, which is not among tools", param="tool_choice")
        return ToolUse([tool for tool in known if tool.name == wanted], required=True, several=several)
    if choice == "required" and not known:
        raise ApiError(400, "tool_choice is required, but there are no tools", param="tool_choice")
    return ToolUse(known, required=choice == "required", several=several)


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that each tool result belongs to an earlier call.

    Raises:
        ApiError: one does not.
    """
    asked: set[str] = set()
    for index, message in enumerate(messages):
        asked |= {call["id"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and message.get("tool_call_id") not in asked:
            where = f"messages[{index}].tool_call_id"
            raise ApiError(400, f"{where} names no call of an assistant's message before it", param=where)
