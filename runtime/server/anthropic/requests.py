"""Validation of Anthropic's requests, and their conversion to chats.

Sampling options, tools, schemas and what is refused are those of OpenAI's requests; only names and shapes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, StrictBool, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from runtime.server.bodies import MISSING, Items, JsonObject, read_object, refused, validated
from runtime.server.errors import fields_named
from runtime.server.openai.forms import (
    MAX_TOOLS,
    CalledFunction,
    CalledTool,
    FunctionName,
    FunctionSpec,
    LeftOut,
    NamedFunction,
    NamedTool,
    Part,
    ResponseFormat,
    SchemaFormat,
    ToolChoice,
    ToolSpec,
    ToolUse,
    answer_form,
    chosen_tools,
    known_tools,
)
from runtime.server.openai.requests import ContentPart, Effort, Limit, Sampling, joined
from runtime.text.reasoning import switch
from runtime.text.sampling import SamplingOptions

BILLING = "x-anthropic-billing-header:"
"""Begins a line of Claude Code's system message that differs in every request, so nothing after it would be found in
the cache. It says nothing to a model."""
NAMES = {"stop": "stop_sequences"}
"""Names of fields here, by those of OpenAI's requests."""
_FIELDS = frozenset(
    ("model", "max_tokens", "messages", "system", "temperature", "top_p", "top_k", "stream", "tools", "tool_choice")
) | {"thinking", "output_config"}
_CALL, _RESULT, _THOUGHT = "tool_use", "tool_result", "thinking"
_READ = frozenset({"text", _CALL, _RESULT, _THOUGHT})
"""Types of blocks that are read; of others only the type is."""


class Block(ContentPart):
    """A block of a message: a text, a call, its result, or reasoning."""

    thinking: str | None = None
    id: str | None = None
    name: FunctionName | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | Items[Block] | None = None
    is_error: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def _others(cls, given: Any) -> Any:
        """Read a document of plain text as a text, and of what can't be read only the type."""
        kind = given.get("type") if isinstance(given, dict) else None
        source = given.get("source") if kind == "document" else None
        if isinstance(source, dict) and source.get("type") == "text":
            return {"type": "text", "text": source.get("data")}
        return {"type": kind} if isinstance(kind, str) and kind not in _READ else given


class Turn(Part):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]

    def plain(self, where: str, left_out: LeftOut, *, last: bool) -> list[dict[str, Any]]:
        """The message, after the results of calls that it holds, in the format of chat templates.

        Args:
            where: Its place in the request.
            left_out: Receives what is left out.
            last: Whether it is what is asked.

        Raises:
            ApiError: it holds what can't be used.
        """
        place, blocks = f"{where}.content", [] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            return [self._answer(place, blocks, left_out)]
        results = [
            _result(block, f"{place}[{at}]", left_out) for at, block in enumerate(blocks) if block.type == _RESULT
        ]
        text = joined(self.content, place, left_out, last=last, skip=(_RESULT,))
        return [*results, {"role": self.role, "content": text}] if text or not results else results

    def _answer(self, place: str, blocks: Sequence[Block], left_out: LeftOut) -> dict[str, Any]:
        text = joined(self.content, place, left_out, skip=(_CALL, _THOUGHT))
        told: dict[str, Any] = {"role": "assistant", "content": text}
        if thought := "\n".join(block.thinking for block in blocks if block.type == _THOUGHT and block.thinking):
            told["reasoning_content"] = thought
        calls = []
        for at, block in enumerate(blocks):
            if block.type == _CALL:
                if block.name is None:
                    raise refused(f"{place}[{at}].name", f"{place}[{at}].name is missing", code=MISSING)
                called = CalledTool(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))
                calls.append(called.record())
        return {**told, "tool_calls": calls} if calls else told


def _result(block: Block, where: str, left_out: LeftOut) -> dict[str, Any]:
    content = joined(block.content, f"{where}.content", left_out)
    content = f"Error: {content}" if block.is_error else content
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


class AnthropicTool(Part):
    """A tool; only those with a schema of their own can be used."""

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def _others(cls, given: Any) -> Any:
        """Other tools are left out, whatever they hold."""
        kind = given.get("type") if isinstance(given, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind != "custom" else given

    def spec(self, where: str) -> ToolSpec:
        """The tool as chat completions write it.

        Raises:
            ApiError: it has no name.
        """
        if self.type not in (None, "custom"):
            return ToolSpec(type=str(self.type))
        if self.name is None:
            raise refused(f"{where}.name", f"{where}.name is missing", code=MISSING)
        function = FunctionSpec(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return ToolSpec(function=function)


class AnthropicChoice(Part):
    """Whether a tool may be called, or must be, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: StrictBool | None = None

    @property
    def choice(self) -> ToolChoice:
        """The choice as chat completions write it.

        Raises:
            ApiError: the tool's name is missing.
        """
        if self.type != "tool":
            return self.type
        if self.name is None:
            raise refused("tool_choice.name", "tool_choice.name is missing", code=MISSING)
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class Thinking(Part):
    """Whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicFormat(Part):
    """The format of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Part):
    """How much the model reasons, and the format of its answer."""

    effort: Effort | None = None
    format: AnthropicFormat | None = None


class CountRequest(Sampling):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: str | Items[Block] | None = None
    tools: Annotated[Items[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """As it is sent, without the other fields of OpenAI's requests."""
        schema = handler.resolve_ref_schema(handler(core))
        sent = {name: own for name, own in schema["properties"].items() if name in _FIELDS}
        return schema | {"properties": {**sent, "stop_sequences": schema["properties"]["stop"]}}

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read a body.

        Raises:
            ApiError: it is no JSON object, or a field is missing, of a wrong type or out of range.
        """
        given = read_object(body)
        known = {name: value for name, value in given.items() if name in _FIELDS and value is not None}
        if given.get("mcp_servers"):
            message = "mcp_servers is not supported: let the client call their tools"
            raise refused("mcp_servers", message, code="unsupported_parameter")
        with fields_named(NAMES):
            return validated({**known, "stop": given.get("stop_sequences")}, cls)

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], LeftOut]:
        """The messages in the format of chat templates, and what of messages and tools is left out.

        Raises:
            ApiError: a message or a tool contains what can't be used.
        """
        left_out = known_tools(self._specs)[1]
        system = self._system(left_out)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        asked = max((index for index, turn in enumerate(self.messages) if turn.role == "user"), default=-1)
        for index, turn in enumerate(self.messages):
            messages += turn.plain(f"messages[{index}]", left_out, last=index == asked)
        return messages, left_out

    def _system(self, left_out: LeftOut) -> str:
        """The system message without the line that differs in every request."""
        texts: list[str] = []
        blocks: Sequence[str | Block] = [self.system] if isinstance(self.system, str) else self.system or ()
        for at, block in enumerate(blocks):
            text = block if isinstance(block, str) else joined([block], "system", left_out)
            if text.startswith(BILLING):
                text = text.partition("\n")[2]
                left_out.append(f"system[{at}] ({BILLING.rstrip(':')})")
            texts.append(text)
        return "\n".join(text for text in texts if text)

    @property
    def resumes(self) -> bool:
        """Whether the last message, the assistant's, is continued rather than answered."""
        last = self.messages[-1]
        if last.role != "assistant" or not last.content:
            return False
        return isinstance(last.content, str) or last.content[-1].type == "text"

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has blocks of reasoning. Reasoning that was not asked for is left out."""
        wanted = self.thinking
        return wanted is not None and wanted.type != "disabled" and wanted.display != "omitted"

    @property
    def _specs(self) -> list[ToolSpec]:
        return [tool.spec(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the model may call.

        Raises:
            ApiError: the choice is not among them.
        """
        wanted = self.tool_choice
        choice = None if wanted is None else wanted.choice
        parallel = None if wanted is None else not wanted.disable_parallel_tool_use
        return chosen_tools(known_tools(self._specs)[0], choice, parallel)

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        kind = "disabled" if self.thinking is None else self.thinking.type
        switched = {} if kind == "adaptive" else switch("off" if kind == "disabled" else "on") or {}
        effort = self.output_config.effort if self.output_config is not None else None
        return {**switched, **({} if effort is None else {"reasoning_effort": effort})}

    def sampling(self) -> SamplingOptions:
        """Sampling options. Parsing a large schema takes a while: call it in a worker thread.

        Raises:
            ApiError: the answer format cannot be enforced.
        """
        form = self.output_config.format if self.output_config is not None else None
        wanted = None
        if form is not None:
            schema = SchemaFormat.model_validate({"schema": form.schema_})
            wanted = ResponseFormat(type="json_schema", json_schema=schema)
        kind = answer_form(wanted, None, self.tool_use, named="output_config.format")
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        return self.options(self.max_tokens, None, kind, budget)


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Limit
