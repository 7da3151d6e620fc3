"""Responses of Ollama's interface: answers, models, and reports of a download."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from models.progress import Progress
from runtime.engine.generation import Piece, Usage
from runtime.load.loading import LoadedModel
from runtime.server.openai.forms import history_arguments
from runtime.server.openai.responses import Body, PartReader, call_id, logprobs_content
from runtime.text.call_reader import Found
from runtime.text.reasoning import TAGS
from runtime.wire.answers import ModelEntry

_THOUGHTFUL = (TAGS[0], "enable_thinking", "reasoning_effort")
"""What chat templates of models that reason hold, one or another."""


class AnswerWriter:
    """Writes one response of /api/chat or /api/generate, as a body or in chunks. Calls come whole."""

    def __init__(self, parts: PartReader, *, model: str, chat: bool, began: float) -> None:
        """Start a response.

        Args:
            parts: Separates the answer's parts.
            model: The request's name of the model.
            chat: Whether the answer is a message; else it is a text.
            began: When the request came, on `time.perf_counter`.
        """
        self._parts, self._model, self._chat = parts, model, chat
        self._began, self._loaded = began, time.perf_counter()

    def opening(self) -> list[Body]:
        """Empty: nothing precedes the text."""
        return []

    def chunks(self, piece: Piece) -> list[Body]:
        """The chunks of a piece; empty if it adds nothing."""
        thought, text, calls = self._parts.read(piece)
        told = []
        if thought or text or calls or piece.logprob is not None:
            told.append(self._chunk(thought, text, calls, [piece]))
        if piece.finish_reason is not None:
            told.append({**self._chunk("", "", [], []), **self._end(piece)})
        return told

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The body of a non-streaming response."""
        parts = [self._parts.read(piece) for piece in pieces]
        thought, text = "".join(part[0] for part in parts), "".join(part[1] for part in parts)
        calls = [call for part in parts for call in part[2]]
        return {**self._chunk(thought, text, calls, pieces), **self._end(pieces[-1])}

    def _chunk(self, thought: str, text: str, calls: Sequence[Found], pieces: Sequence[Piece]) -> Body:
        body: Body = {"model": self._model, "created_at": stamp(datetime.now(UTC))}
        thinking = {"thinking": thought} if thought else {}
        if self._chat:
            called = {"tool_calls": [_call(index, call) for index, call in enumerate(calls)]} if calls else {}
            body["message"] = {"role": "assistant", "content": text, **thinking, **called}
        else:
            body |= {"response": text, **thinking}
        if logprobs := [piece.logprob for piece in pieces if piece.logprob is not None]:
            body["logprobs"] = logprobs_content(logprobs)
        return {**body, "done": False}

    def _end(self, piece: Piece) -> Body:
        assert piece.usage is not None, "the last piece has it"
        reason = "length" if piece.finish_reason == "length" else "stop"
        spent, load = time.perf_counter() - self._began, self._loaded - self._began
        durations = {"total_duration": _ns(spent), "load_duration": _ns(load)}
        return {"done": True, "done_reason": reason, **durations, **_counts(piece.usage)}


def _counts(usage: Usage) -> Body:
    speed = usage.decode_tokens_per_s
    return {
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(usage.prefill_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns((usage.completion_tokens - 1) / speed if speed > 0 else 0.0),
    }


def _call(index: int, call: Found) -> Body:
    function = {"index": index, "name": call.name, "arguments": history_arguments(call.arguments)}
    return {"id": call_id(), "function": function}


def empty_answer(model: str, reason: str, *, chat: bool) -> Body:
    """The response to a request that only loads or unloads a model."""
    said: Body = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": stamp(datetime.now(UTC)), **said, "done": True, "done_reason": reason}


def _ns(spent_s: float) -> int:
    return round(spent_s * 1e9)


def stamp(moment: datetime) -> str:
    """A time as Ollama writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def listed(entry: ModelEntry) -> Body:
    """A model of /api/tags."""
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _made(entry),
        "size": entry.disk_bytes,
        "digest": digest(entry.name, str(entry.created)),
        "details": _details(entry),
    }


def running(entry: ModelEntry, loaded: LoadedModel, unloads_after_s: float) -> Body:
    """A model of /api/ps. Its end is counted from now, as if a request had just ended."""
    end = datetime.max.replace(microsecond=0, tzinfo=UTC)
    if not math.isinf(unloads_after_s):
        end = datetime.now(UTC) + timedelta(seconds=min(unloads_after_s, 1e9))
    facts = {"size": loaded.held_bytes, "size_vram": loaded.card_bytes, "context_length": loaded.context}
    return {**listed(entry), **facts, "expires_at": stamp(end)}


def shown(entry: ModelEntry, template: str) -> Body:
    """The response of /api/show."""
    thinking = ["thinking"] if any(word in template for word in _THOUGHTFUL) else []
    return {
        "modelfile": f"FROM {entry.name}\n",
        "parameters": "",
        "template": template,
        "details": _details(entry),
        "model_info": {
            "general.architecture": entry.family,
            "general.basename": entry.name,
            "general.parameter_count": entry.parameters,
            f"{entry.family}.context_length": entry.context,
        },
        "capabilities": ["completion", "tools", "embedding", *thinking],
        "modified_at": _made(entry),
    }


def _details(entry: ModelEntry) -> Body:
    count = entry.parameters
    return {
        "parent_model": "",
        "format": "lowbit-chat",
        "family": entry.family,
        "families": [entry.family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": f"{entry.bits:g}-bit",
    }


def _made(entry: ModelEntry) -> str:
    return stamp(datetime.fromtimestamp(entry.created, UTC))


def digest(*names: str) -> str:
    """64 hexadecimal digits that tell things apart, where clients expect a checksum."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def report(progress: Progress) -> Body:
    """A report of a download, and of making the model. Bytes are counted under the name of what they belong to."""
    body: Body = {"status": progress.message}
    if progress.unit == "bytes" and progress.total is not None:
        counted: dict[str, Any] = {"total": round(progress.total), "completed": round(progress.done)}
        body |= {"digest": f"sha256:{digest(progress.phase)}", **counted}
    return body
