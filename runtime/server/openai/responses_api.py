"""OpenAI's Responses interface: requests and their conversion to chats, the response object and its events."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, StrictBool, ValidationError, model_validator

from runtime.engine.generation import FinishReason, Piece, Usage
from runtime.load.loading import Accepted
from runtime.server.bodies import Items, JsonObject, at_most, explained, refused
from runtime.server.openai.forms import (
    MAX_TOOLS,
    Allowance,
    AllowedTools,
    CalledFunction,
    CalledTool,
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
from runtime.server.openai.requests import ContentPart, Count, Reasoning, Sampling, effort_variables, joined
from runtime.server.openai.responses import Body, PartReader, call_id
from runtime.text.call_reader import Found
from runtime.text.sampling import SamplingOptions

_OWN = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
"""Types of items that are read as they are."""
MAX_METADATA = 16
"""Most entries of a request's metadata, as in OpenAI's interface."""


class FlatFunction(Part):
    """A tool, as this interface writes it; only functions can be used."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Any = None
    strict: Any = None

    @property
    def nested(self) -> dict[str, Any]:
        """The same as chat completions write it."""
        if self.type != "function":
            return {"type": self.type}
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFlat(NamedFunction):
    """The function that must be called, or one that may be."""

    type: Literal["function"]


class FlatAllowance(Part):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedFlat], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Part):
    """The answer format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(Part):
    """Options of the answer's text."""

    format: TextFormat | None = None


class InputItem(Part):
    """An item of the input: a message, a call, or its result; others are left out."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Items[ContentPart] | None = None
    summary: Items[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: str | Items[ContentPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _other_calls(cls, given: Any) -> Any:
        """Read what other tools leave behind as calls and results of functions."""
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind in _OWN:
            return given
        if kind.endswith("_output"):
            output = given.get("output")
            text = output if isinstance(output, str | list) else json.dumps(output)
            return {"type": kind, "call_id": given.get("call_id"), "output": text}
        arguments = next(
            (given[name] for name in ("arguments", "input", "action") if given.get(name) is not None), None
        )
        name = given.get("name") or kind.removesuffix("_call")
        return {"type": kind, "call_id": given.get("call_id"), "name": name, "arguments": arguments}

    @property
    def thought(self) -> str:
        """The text of an item of reasoning."""
        parts = self.content if isinstance(self.content, list) and self.content else self.summary or ()
        return "\n".join(part.text for part in parts if part.text)


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses."""

    REFUSED: ClassVar[dict[str, str]] = {
        "previous_response_id": "previous_response_id is not supported: nothing is stored, so send the whole input",
        "conversation": "conversation is not supported: nothing is stored, so send the whole input",
        "background": "background is not supported: stream the answer, or wait for it",
        "prompt": "prompt templates are not supported: send the text as input",
        "response_format": "response_format is not supported here: use text.format",
    }

    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[FlatFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedFlat | FlatAllowance | None = None
    parallel_tool_calls: StrictBool | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: StrictBool | None = None
    prompt: Any = None

    def messages(self, answered: Mapping[str, Mapping[str, Any]]) -> tuple[list[dict[str, Any]], LeftOut]:
        """The messages in the format of chat templates, and what of items and tools is left out.

        Args:
            answered: Items of earlier answers by their ids, to which the input may refer.

        Raises:
            ApiError: an item is invalid.
        """
        left_out = known_tools(self._specs)[1]
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            asked = max((index for index, item in enumerate(self.input) if item.role == "user"), default=-1)
            thought = ""
            for index, item in enumerate(self.input):
                known = answered.get(item.id or "") if item.type == "item_reference" else None
                item = item if known is None else InputItem.model_validate(known)
                thought = _add(messages, item, thought, f"input[{index}]", left_out, last=index == asked)
        if not messages:
            raise refused("input", "input holds nothing to answer")
        return messages, left_out

    def sampling(self) -> SamplingOptions:
        form = self.text.format if self.text is not None else None
        wanted = None
        if form is not None:
            schema = SchemaFormat.model_validate({"schema": form.schema_, "name": form.name, "strict": form.strict})
            wanted = ResponseFormat(type=form.type, json_schema=schema)
        kind = answer_form(wanted, self.structured_outputs, self.tool_use, named="text.format")
        budget = self.reasoning.max_tokens if self.reasoning is not None else None
        return self.options(self.max_output_tokens, None, kind, budget)

    @property
    def _specs(self) -> list[ToolSpec]:
        """The tools, as chat completions write them."""
        specs = []
        for index, tool in enumerate(self.tools or ()):
            try:
                specs.append(ToolSpec.model_validate(tool.nested))
            except ValidationError as error:
                raise explained(error, f"tools[{index}]") from None
        return specs

    @property
    def tool_use(self) -> ToolUse:
        choice: ToolChoice | None
        if isinstance(self.tool_choice, NamedFlat):
            choice = _named(self.tool_choice)
        elif isinstance(self.tool_choice, FlatAllowance):
            named = [_named(tool) for tool in self.tool_choice.tools]
            choice = Allowance(
                type="allowed_tools", allowed_tools=AllowedTools(mode=self.tool_choice.mode, tools=named)
            )
        else:
            choice = self.tool_choice
        return chosen_tools(known_tools(self._specs)[0], choice, self.parallel_tool_calls)

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return effort_variables(self.reasoning.effort if self.reasoning is not None else None)


def _named(tool: NamedFlat) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=tool.name))


def _add(
    messages: list[dict[str, Any]], item: InputItem, thought: str, where: str, left_out: LeftOut, *, last: bool
) -> str:
    """Add an input item as a message, or to the message it belongs to.

    Args:
        messages: Receives it.
        item: The item.
        thought: Reasoning before it.
        where: Its place in the request.
        left_out: Receives what is left out.
        last: Whether it is what is asked.

    Returns:
        Reasoning that belongs to the next item.
    """
    if item.type == "message":
        if item.role is None:
            raise refused(where, f"{where} needs a role")
        content = joined(item.content, f"{where}.content", left_out, last=last)
        messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
    elif item.type == "reasoning" and item.thought:
        return f"{thought}\n{item.thought}".strip()
    elif item.call_id and item.output is not None:
        content = joined(item.output, f"{where}.output", left_out)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.call_id and item.name:
        called = CalledTool(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(called.record())
    elif item.type in ("function_call", "function_call_output"):
        raise refused(where, f"{where} needs a call_id, and a name or an output")
    else:
        left_out.append(f"{where} ({item.type})")
        return thought
    if thought and messages[-1]["role"] == "assistant":
        messages[-1]["reasoning_content"] = thought
    return ""


class _Text(NamedTuple):
    """How an item with text is written."""

    prefix: str
    """Of its id."""
    part: str
    """The type of its content, and the name of its events."""
    more: Body
    """Further fields of the content."""
    told: Body
    """Further fields of the events with text."""


_TEXTS = {
    "message": _Text("msg", "output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": _Text("rs", "reasoning_text", {}, {}),
}


class ResponseWriter:
    """Writes one response, as a body or as events. Text between calls becomes a separate message."""

    def __init__(
        self,
        asked: ResponsesRequest,
        accepted: Accepted,
        parts: PartReader,
        keep: Callable[[Sequence[Body]], object],
    ) -> None:
        """Start a response; `parts` separates the answer's parts, and `keep` gets the items at the end."""
        self._parts, self._keep = parts, keep
        self._events = 0
        self._growing: Body | None = None  # the message or the reasoning that text is appended to
        self._calling: Body | None = None  # the call whose arguments are being written
        self._body: Body = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": accepted.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **_asked(asked),
        }

    def opening(self) -> list[Body]:
        """Events before the first text."""
        return [self._event(f"response.{state}", response=self._now()) for state in ("created", "in_progress")]

    def chunks(self, piece: Piece) -> list[Body]:
        """Events of a piece; empty if it adds nothing."""
        return list(self._told(piece))

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The body of a non-streaming response."""
        self.opening()
        for piece in pieces:
            self.chunks(piece)
        return self._body

    def _told(self, piece: Piece) -> Iterator[Body]:
        thought, text, calls = self._parts.read(piece)
        for kind, said in (("reasoning", thought), ("message", text)):
            if said:
                yield from self._close_call()
                yield from self._add_text(said, kind)
        for call in calls:
            if call.name is not None:
                yield from self._close_text()
                yield from self._close_call()
            yield from self._add_call(call)
        if piece.finish_reason is None or piece.usage is None:
            return
        if not self._body["output"]:
            yield from self._open_text()
        complete = piece.finish_reason == "stop"
        yield from self._close_text(complete=complete)
        yield from self._close_call(complete=complete)
        self._end(piece.finish_reason, piece.usage)
        yield self._event("response.completed" if complete else "response.incomplete", response=self._now())

    def _open_text(self, kind: str = "message") -> Iterator[Body]:
        about: Body = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        item = {"id": f"{_TEXTS[kind].prefix}_{uuid.uuid4().hex}", "type": kind, **about}
        self._growing = {**item, "status": "in_progress", "content": []}
        yield self._added(self._growing)
        part: Body = {"type": _TEXTS[kind].part, "text": "", **_TEXTS[kind].more}
        yield self._event("response.content_part.added", **self._place(), part=dict(part))
        self._growing["content"].append(part)

    def _add_text(self, text: str, kind: str) -> Iterator[Body]:
        if self._growing is None or self._growing["type"] != kind:
            yield from self._close_text()
            yield from self._open_text(kind)
        assert self._growing is not None
        self._growing["content"][0]["text"] += text
        yield self._event(f"response.{_TEXTS[kind].part}.delta", **self._place(), delta=text, **_TEXTS[kind].told)

    def _close_text(self, *, complete: bool = True) -> Iterator[Body]:
        if self._growing is None:
            return
        place, (part,), kind = self._place(), self._growing["content"], _TEXTS[self._growing["type"]]
        yield self._event(f"response.{kind.part}.done", **place, text=part["text"], **kind.told)
        yield self._event("response.content_part.done", **place, part=dict(part))
        self._growing["status"] = "completed" if complete else "incomplete"
        yield self._done(self._growing)
        self._growing = None

    def _add_call(self, call: Found) -> Iterator[Body]:
        """Begin a call, or continue it."""
        if call.name is not None:
            self._calling = {
                "id": f"fc_{uuid.uuid4().hex}",
                "type": "function_call",
                "call_id": call_id(),
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            yield self._added(self._calling)
        assert self._calling is not None, "its first piece has the name"
        self._calling["arguments"] += call.arguments
        if call.arguments:
            delta = "response.function_call_arguments.delta"
            yield self._event(delta, **self._call_place(), delta=call.arguments)

    def _close_call(self, *, complete: bool = True) -> Iterator[Body]:
        item = self._calling
        if item is None:
            return
        done = {"name": item["name"], "arguments": item["arguments"]}
        item["status"] = "completed" if complete else "incomplete"
        yield self._event("response.function_call_arguments.done", **self._call_place(), **done)
        yield self._done(item)
        self._calling = None

    def _call_place(self) -> Body:
        assert self._calling is not None
        return {"item_id": self._calling["id"], "output_index": self._body["output"].index(self._calling)}

    def _added(self, item: Body) -> Body:
        """Append an item to the response."""
        self._body["output"].append(item)
        index = len(self._body["output"]) - 1
        return self._event("response.output_item.added", output_index=index, item=copy.deepcopy(item))

    def _done(self, item: Body) -> Body:
        index = self._body["output"].index(item)
        return self._event("response.output_item.done", output_index=index, item=copy.deepcopy(item))

    def _place(self) -> Body:
        assert self._growing is not None
        return {"item_id": self._growing["id"], "output_index": len(self._body["output"]) - 1, "content_index": 0}

    def _end(self, finish: FinishReason, usage: Usage) -> None:
        self._body["status"] = "completed" if finish == "stop" else "incomplete"
        if finish == "length":
            self._body["incomplete_details"] = {"reason": "max_output_tokens"}
        self._body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parts.thoughts},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self._keep(self._body["output"])

    def _now(self) -> Body:
        return copy.deepcopy(self._body)

    def _event(self, kind: str, **values: Any) -> Body:
        event = {"type": kind, "sequence_number": self._events, **values}
        self._events += 1
        return event


def _asked(asked: ResponsesRequest) -> Body:
    """The request's fields that a response repeats."""
    form = asked.text.format if asked.text is not None else None
    choice = asked.tool_choice
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            {"strict": False, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in asked.tools or ()
        ],
        "truncation": "disabled",
    }
