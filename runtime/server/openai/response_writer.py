"""Responses of OpenAI's Responses interface: the response object, and the events of its stream."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from runtime.engine.generation import FinishReason, Piece, Usage
from runtime.server.openai.response_requests import ResponsesRequest
from runtime.server.openai.responses import Body, call_id, read_piece
from runtime.server.service.service import Accepted
from runtime.text.call_reader import CallReader, Found


class ResponseWriter:
    """Writes one response, as a body or as events. Text between calls becomes a separate message."""

    def __init__(self, asked: ResponsesRequest, accepted: Accepted, calls: CallReader | None) -> None:
        """Start a response; `calls` parses tool calls, if there are tools."""
        self._calls = calls
        self._opening = accepted.opening
        self._events = 0
        self._growing: Body | None = None  # the message that text is appended to
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
        events = [self._event(f"response.{state}", response=self._now()) for state in ("created", "in_progress")]
        return [*events, *self._add_text(self._opening)] if self._opening else events

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
        text, calls = read_piece(piece, self._calls)
        if text:
            yield from self._close_call()
            yield from self._add_text(text)
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
        yield from self._close_call()
        self._end(piece.finish_reason, piece.usage)
        yield self._event("response.completed" if complete else "response.incomplete", response=self._now())

    def _open_text(self) -> Iterator[Body]:
        self._growing = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._added(self._growing)
        part: Body = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place(), part=dict(part))
        self._growing["content"].append(part)

    def _add_text(self, text: str) -> Iterator[Body]:
        if self._growing is None:
            yield from self._open_text()
        assert self._growing is not None
        self._growing["content"][0]["text"] += text
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _close_text(self, *, complete: bool = True) -> Iterator[Body]:
        if self._growing is None:
            return
        place, (part,) = self._place(), self._growing["content"]
        yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
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

    def _close_call(self) -> Iterator[Body]:
        item = self._calling
        if item is None:
            return
        done = {"name": item["name"], "arguments": item["arguments"]}
        item["status"] = "completed"
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _now(self) -> Body:
        """The response so far."""
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
