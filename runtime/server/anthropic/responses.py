"""Responses of Anthropic's interface: the message, and the events of a stream."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from runtime.engine.generation import Piece, Usage
from runtime.load.loading import Accepted
from runtime.server.openai.forms import history_arguments
from runtime.server.openai.responses import Body, PartReader, call_id
from runtime.text.call_reader import Found

SIGNATURE = "lowbit-chat"
"""Stands where Anthropic signs reasoning; clients only send it back."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""What a block grows by: the type of the event's `delta`, and its field."""


class MessageWriter:
    """Writes one response, as a body or as events."""

    def __init__(self, accepted: Accepted, parts: PartReader, *, thinking: bool, stops: Collection[str]) -> None:
        """Start a response.

        Args:
            accepted: What is known of the answer.
            parts: Separates the answer's parts.
            thinking: Whether to show reasoning.
            stops: The request's stop sequences.
        """
        self._parts, self._thinking, self._stops = parts, thinking, stops
        self._growing: Body | None = None  # the block that is being written
        self._arguments = ""  # of the call that is being written
        self._body: Body = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": accepted.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(accepted.prompt_tokens, 0, 0),
        }

    def opening(self) -> list[Body]:
        """The event before the first block."""
        return [{"type": "message_start", "message": copy.deepcopy(self._body)}]

    def chunks(self, piece: Piece) -> list[Body]:
        """Events of a piece; empty if it adds nothing."""
        return list(self._told(piece))

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The body of a non-streaming response."""
        for piece in pieces:
            self.chunks(piece)
        return self._body

    def _told(self, piece: Piece) -> Iterator[Body]:
        thought, text, calls = self._parts.read(piece)
        if thought and self._thinking:
            yield from self._grow("thinking", thought)
        if text:
            yield from self._grow("text", text)
        for call in calls:
            yield from self._call(call)
        if piece.finish_reason is None or piece.usage is None:
            return
        yield from self._close()
        yield from self._end(piece, piece.usage)

    def _grow(self, kind: str, text: str) -> Iterator[Body]:
        """Add to the block of a kind, which begins if the one before is of another."""
        if self._growing is None or self._growing["type"] != kind:
            yield from self._open({"type": kind, _DELTAS[kind][1]: "", **_EXTRA.get(kind, {})})
        assert self._growing is not None
        self._growing[_DELTAS[kind][1]] += text
        yield self._delta(kind, text)

    def _call(self, call: Found) -> Iterator[Body]:
        """Begin a call, or continue it."""
        if call.name is not None:
            yield from self._open({"type": "tool_use", "id": f"toolu_{call_id()}", "name": call.name, "input": {}})
            self._arguments = ""
        self._arguments += call.arguments
        if call.arguments:
            yield self._delta("tool_use", call.arguments)

    def _open(self, block: Body) -> Iterator[Body]:
        yield from self._close()
        self._growing = block
        self._body["content"].append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Body]:
        block = self._growing
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"] = history_arguments(self._arguments)
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        yield self._event("content_block_stop")
        self._growing = None

    def _delta(self, kind: str, text: str) -> Body:
        name, field = _DELTAS[kind]
        return self._event("content_block_delta", delta={"type": name, field: text})

    def _event(self, kind: str, **values: Any) -> Body:
        """An event of the last block."""
        return {"type": kind, "index": len(self._body["content"]) - 1, **values}

    def _end(self, piece: Piece, usage: Usage) -> Iterator[Body]:
        stopped = piece.stop if piece.stop in self._stops else None
        if piece.finish_reason == "length":
            reason = "max_tokens"
        elif self._parts.calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        ended = {"stop_reason": reason, "stop_sequence": stopped if reason == "stop_sequence" else None}
        counted = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._body |= {**ended, "usage": counted}
        yield {"type": "message_delta", "delta": ended, "usage": counted}
        yield {"type": "message_stop"}


_EXTRA: dict[str, Body] = {"thinking": {"signature": ""}}
"""Further fields of a block that begins."""


def _usage(prompt: int, cached: int, completion: int) -> Body:
    """Counts of tokens. All of the prompt is `input_tokens` and `cache_read_input_tokens` together."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
