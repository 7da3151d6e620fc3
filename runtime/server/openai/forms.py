"""Validation of a request's tools and answer format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import from_json

from runtime.errors import RequestError
from runtime.server.bodies import MISSING, Items, JsonObject
from runtime.server.errors import ApiError
from runtime.system.foreign import read_json
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import ANY_OBJECT, Grammar
from runtime.text.tool_calls import Tool

MAX_TOOLS = 512
"""Most tools per request."""
MAX_GRAMMAR = 2**14
"""Most characters of `structured_outputs.grammar`: nested terminals take cubic time."""
MAX_CHOICES = 1000
"""Most texts of `structured_outputs.choice`."""

FunctionName = Annotated[str, Field(min_length=1, max_length=128)]
Choice = Annotated[str, Field(min_length=1)]
LeftOut = list[str]
"""What of a request cannot be used: places, each with the kind of thing that is there."""


class Part(BaseModel):
    """Of a request: unknown fields are ignored, types are not converted."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class FunctionSpec(Part):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[JsonObject | None, BeforeValidator(lambda given: None if given == [] else given)] = None
    """PHP writes an empty object as an empty list."""
    strict: StrictBool | None = None

    def tool(self) -> Tool:
        """Convert to the program's own type."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters if self.parameters is not None else {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class ToolSpec(Part):
    """A tool; only functions can be used."""

    type: str = "function"
    function: FunctionSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _others(cls, given: Any) -> Any:
        """Other tools are left out, whatever they hold."""
        if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] != "function":
            return {"type": given["type"]}
        return given


class NamedFunction(Part):
    """A function by its name."""

    name: FunctionName


class NamedTool(Part):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    """Some of the tools, one of which may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class Allowance(Part):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Part):
    """The function of a call in an assistant's message."""

    name: str = ""
    arguments: Any = None


class CalledTool(Part):
    """A call in an assistant's message."""

    id: str | None = None
    function: CalledFunction

    def record(self) -> dict[str, Any]:
        """Convert to the format of chat templates, with arguments as an object."""
        arguments = history_arguments(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def history_arguments(given: Any) -> dict[str, Any]:
    """Arguments of a call in the history as the object that chat templates take.

    What a model wrote is passed on, whatever it is: of JSON that was cut the beginning, as far as it can be read.
    """
    if isinstance(given, str):
        try:
            given = read_json(given)
        except ValueError:
            with suppress(ValueError):
                given = from_json(given, allow_inf_nan=False, allow_partial="trailing-strings")
    if isinstance(given, dict):
        return given
    return {"arguments": given} if given else {}


ToolChoice = Literal["none", "auto", "required", "any"] | NamedTool | Allowance


class SchemaFormat(Part):
    """A JSON schema with its name."""

    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    name: str | None = None
    strict: StrictBool | None = None


class ResponseFormat(Part):
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


class StructuredOutputs(Part):
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
    """Fields of `SamplingOptions`."""

    grammar: Grammar | None
    """Of an answer that calls no tools."""
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
    """The form of an answer. Where tools may be called, it has the format or calls; where they must be, it calls.

    Args:
        response_format: The answer format in OpenAI's interface.
        structured: The answer format in vLLM's interface.
        choice: The tools that may be called.
        named: The request's name for its `response_format`.

    Raises:
        ApiError: the fields contradict each other, or one cannot be enforced; names the field.
    """
    wanted = response_format if response_format is not None and response_format.type != "text" else None
    if wanted is not None and structured is not None:
        message = f"{named} and structured_outputs both decide the form of the answer: give one"
        raise ApiError(400, message, param="structured_outputs")
    form: AnswerForm = {}
    field = "structured_outputs" if structured is not None else named
    try:
        if (given := wanted or structured) is not None:
            form["grammar"] = given.grammar()
        field = "tools"
        if choice is not None and choice.tools:
            form["calls"] = CallRules.of(choice.tools, required=choice.required, several=choice.several)
    except RequestError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from error
    return form


def known_tools(specs: Sequence[ToolSpec] | None) -> tuple[list[Tool], LeftOut]:
    """The functions among tools, the first of each name, and what is left out.

    Raises:
        ApiError: a function is missing.
    """
    known: dict[str, Tool] = {}
    left_out: LeftOut = []
    for index, spec in enumerate(specs or ()):
        if spec.type != "function":
            left_out.append(f"tools[{index}] ({spec.type})")
        elif spec.function is None:
            raise ApiError(400, f"tools[{index}].function is missing", param=f"tools[{index}].function", code=MISSING)
        elif spec.function.name in known:
            left_out.append(f"tools[{index}] ({spec.function.name} again)")
        else:
            known[spec.function.name] = spec.function.tool()
    return list(known.values()), left_out


def chosen_tools(known: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """The tools to present to the model, and whether it must call one, or may call several.

    Raises:
        ApiError: the choice is not among the tools.
    """
    several = parallel is not False
    if choice == "none":
        return ToolUse(())
    if isinstance(choice, NamedTool | Allowance):
        named = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        wanted = {one.function.name for one in named}
        if missing := sorted(wanted - {tool.name for tool in known}):
            raise ApiError(400, f"tool_choice names {missing[0]}, which is not among tools", param="tool_choice")
        required = isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"
        return ToolUse([tool for tool in known if tool.name in wanted], required=required, several=several)
    required = choice in ("required", "any")
    if required and not known:
        raise ApiError(400, "tool_choice is required, but there are no tools that can be called", param="tool_choice")
    return ToolUse(known, required=required, several=several)
