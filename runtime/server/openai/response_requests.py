"""Validation of requests of OpenAI's Responses interface, and their conversion to chats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from runtime.server.openai.forms import (
    MAX_TOOLS,
    CallId,
    FunctionName,
    FunctionSpec,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SchemaFormat,
    ToolChoice,
    ToolSpec,
    ToolUse,
    answer_form,
    chosen_tools,
)
from runtime.server.openai.requests import ChatRequest, Count, Sampling
from runtime.server.reading import Items, JsonObject, at_most, refused
from runtime.text.sampling import SamplingOptions


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class _Function(_Part):
    type: Literal["function"]


class FlatFunction(FunctionSpec, _Function):
    """A function, as this interface writes it."""


class NamedFlat(NamedFunction, _Function):
    """The function that must be called."""


class TextFormat(_Part):
    """The answer format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(_Part):
    """Options of the answer's text."""

    format: TextFormat | None = None


class InputItem(_Part):
    """An item of the input: a message, a call, or its result."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Items[dict[str, Any]] | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Items[dict[str, Any]] | None = None


MAX_METADATA = 16
"""Most entries of a request's metadata, as in OpenAI's interface."""
TEXTS = frozenset({"input_text", "output_text", "text"})
"""Types of text content."""


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses."""

    REFUSED: ClassVar[dict[str, str]] = {
        **Sampling.REFUSED,
        "previous_response_id": "previous_response_id is not supported: nothing is stored, so send the whole input",
        "conversation": "conversation is not supported: nothing is stored, so send the whole input",
        "background": "background is not supported: stream the answer, or wait for it",
        "prompt": "prompt templates are not supported: send the text as input",
    }

    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[FlatFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFlat | None = None
    parallel_tool_calls: StrictBool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: StrictBool | None = None
    prompt: Any = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, in the format of chat templates.

        Raises:
            ApiError: an item is invalid.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for index, item in enumerate(self.input):
                _add(messages, item, f"input[{index}]")
        if not messages:
            raise refused("input", "input holds nothing to answer")
        body = {"model": self.model, "messages": messages}
        return ChatRequest.model_validate(body).conversation

    def sampling(self) -> SamplingOptions:
        """See `ChatRequest.sampling`."""
        form = self.text.format if self.text is not None else None
        wanted = None
        if form is not None:
            schema = SchemaFormat.model_validate({"schema": form.schema_, "name": form.name, "strict": form.strict})
            wanted = ResponseFormat(type=form.type, json_schema=schema)
        kind = answer_form(wanted, self.structured_outputs, self.tool_use, named="text.format")
        return self.options(self.max_output_tokens, None, kind)

    @property
    def tool_use(self) -> ToolUse:
        """See `ChatRequest.tool_use`."""
        specs = [ToolSpec(type="function", function=FunctionSpec(**dict(tool))) for tool in self.tools or ()]
        choice: ToolChoice | None = None
        if isinstance(self.tool_choice, NamedFlat):
            choice = NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        else:
            choice = self.tool_choice
        return chosen_tools(specs, choice, self.parallel_tool_calls)


def _add(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add an input item as a message, or to the message it belongs to."""
    if item.type == "message":
        if item.role is None or item.content is None:
            raise refused(where, f"{where} needs a role and a content")
        messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
    elif item.type == "function_call":
        if item.call_id is None or item.name is None:
            raise refused(where, f"{where} needs a call_id and a name")
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments or "{}"}}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise refused(where, f"{where} needs a call_id and an output")
        content = _text(item.output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.type != "reasoning":  # other models' reasoning is not part of the conversation
        raise refused(f"{where}.type", f"{where} is of type {item.type!r}, which is not supported")


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        text = part.get("text")
        if part.get("type") not in TEXTS or not isinstance(text, str):
            raise refused(f"{where}[{position}]", f"{where}[{position}] is no text, but the models here read only text")
        texts.append(text)
    return "".join(texts)
