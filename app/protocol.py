"""What a runtime's answers mean: records, errors and reports, read from JSON. Importing this is cheap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from app.errors import ClientError, ProtocolError, answer_error

_STATUS_OF_CODE = {
    "model_not_found": 404,
    "busy": 409,
    "out_of_memory": 503,
    "backend_unavailable": 503,
    "model_unavailable": 503,
    "overloaded": 503,
    "cancelled": 503,
}
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the runtime is doing and with what; fields about a model are None while none is loaded."""

    state: str
    """`empty`, `loading`, `ready`, `generating` or `failed`."""
    model: str | None
    """The model that is loaded, or being loaded."""
    backend: str | None
    """What runs it."""
    reason: str | None
    """Why that."""
    bits: float | None
    """Bits of its base weights."""
    kv: str | None
    """Precision of its KV cache."""
    k_chunk: Mapping[str, int] | None
    """Compensated channels per 1024, by layer type."""
    context: int | None
    """Tokens of context."""
    memory_bytes: int | None
    """Memory that the runtime process holds."""
    weight_bytes: int | None
    """Bytes of weights read for one token."""
    kv_bytes: int | None
    """Bytes of the KV cache."""
    waiting: int
    """Requests that wait for their turn."""
    pid: int
    """Process id of the runtime."""
    version: str
    """Version of the program that runs it."""
    error: Mapping[str, str | None] | None
    """Why the last load failed: message, type, param, code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that can be loaded."""

    name: str
    """Its name."""
    bits: int
    """Bits of its base weights."""
    bits_per_weight: float
    """Bits of all linear layers, scales included, divided by their weights."""
    disk_bytes: int
    """Size on disk."""
    gpu_bytes: int
    """Bytes that a device needs for the weights."""
    residual_bytes: int
    """Bytes of the residual codes."""
    parameters: int
    """Weights of the full-precision model."""
    family: str
    """Architecture."""
    context: int
    """Longest context in tokens."""
    bundled: bool
    """Whether it came with the program."""
    perplexity_before: float | None
    """Of the full-precision model, on a short text."""
    perplexity_after: float | None
    """Of the low-bit model, on the same text."""
    warning: str | None
    """What a person should know before using it."""
    loaded: bool
    """Whether it is loaded now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What an answer cost."""

    ttft_s: float
    """Seconds from the request to the first token."""
    prefill_tokens_per_s: float
    """Speed of reading the prompt."""
    decode_tokens_per_s: float
    """Speed of writing the answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Of these, tokens that were in the cache still."""
    completion_tokens: int
    """Tokens of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How an answer is drawn. None leaves it to the runtime."""

    model: str | None = None
    """Model that answers; None is the one that is loaded, or was loaded last through this client."""
    temperature: float | None = None
    """Spread of sampling; 0 takes the most likely token."""
    top_p: float | None = None
    """Share of probability sampled from."""
    top_k: int | None = None
    """Most tokens sampled from; 0 is all."""
    min_p: float | None = None
    """Least probability relative to the best."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens seen before."""
    max_tokens: int | None = None
    """Most tokens of the answer."""
    seed: int | None = None
    """Makes draws repeatable."""
    stop: Sequence[str] | None = None
    """Texts that end the answer."""
    continue_final: bool = False
    """Whether the last message, the assistant's, is continued rather than answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of an answer."""

    text: str
    """What was added; maybe empty."""
    finish_reason: str | None = None
    """`stop` or `length`, in the last piece."""
    timings: Timings | None = None
    """In the last piece."""


def status_error(status: int, content: bytes) -> ClientError:
    """The error of an answer with an error status."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return _error(status, body if isinstance(body, dict) else {})


def stream_error(event: Mapping[str, Any]) -> ClientError:
    """The error that came in the middle of a stream, where there is no status: its code tells the kind."""
    found = event.get("error")
    told = found if isinstance(found, dict) else {}
    refusal = 400 if told.get("type") == "invalid_request_error" else 500
    return _error(_STATUS_OF_CODE.get(str(told.get("code")), refusal), event)


def _error(status: int, body: Mapping[str, Any]) -> ClientError:
    found = body.get("error")
    told = found if isinstance(found, dict) else {}
    message, param, code = told.get("message"), told.get("param"), told.get("code")
    return answer_error(
        status,
        message if isinstance(message, str) and message else f"the runtime answered with status {status}",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def read_object(data: str | bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ProtocolError("the runtime answered with something that is not JSON") from error
    if not isinstance(body, dict):
        raise ProtocolError("the runtime answered with something that is not a JSON object")
    return body


def read_items(value: object) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError("the runtime's answer lacks a list that it should have")
    return value


def read_record(kind: type[R], body: Mapping[str, Any]) -> R:
    """A dataclass from a JSON object; fields that this version does not know are left out."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in body]
    if missing:
        raise ProtocolError(f"the runtime's answer lacks {', '.join(missing)}")
    return kind(**{name: body[name] for name in names})


def read_delta(choice: Mapping[str, Any], timings: object) -> ChatDelta:
    """One choice of a chunk."""
    delta, finish = choice.get("delta"), choice.get("finish_reason")
    text = delta.get("content") if isinstance(delta, dict) else None
    return ChatDelta(
        text=text if isinstance(text, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        timings=read_record(Timings, timings) if isinstance(timings, dict) else None,
    )


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not left open."""
    return {key: value for key, value in options.items() if value is not None}
