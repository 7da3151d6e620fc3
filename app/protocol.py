"""How the client speaks: chats in OpenAI's protocol, and answers and errors read from JSON. Importing this is cheap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.errors import ClientError, ProtocolError, answer_error
from runtime.wire.answers import STATUS_OF_CODE, Timings
from runtime.wire.codec import WireError, from_json

R = TypeVar("R")


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
    """Divides the logits of tokens that the answer has had."""
    max_tokens: int | None = None
    """Most tokens of the answer."""
    seed: int | None = None
    """Makes draws repeatable."""
    stop: Sequence[str] | None = None
    """Texts that end the answer."""
    chat: str | None = None
    """The conversation that the answer belongs to, by a name of its own; `RuntimeClient.forget` takes it."""
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
    model: str | None = None
    """The model that answers."""


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
    return _error(STATUS_OF_CODE.get(str(told.get("code")), refusal), event)


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


def read(kind: type[R], value: object) -> R:
    """A record of the wire.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return from_json(kind, value)
    except WireError as error:
        raise ProtocolError(f"the runtime's answer cannot be read: {error}") from error


def read_delta(choice: Mapping[str, Any], timings: object, model: object = None) -> ChatDelta:
    """One choice of a chunk."""
    delta, finish = choice.get("delta"), choice.get("finish_reason")
    text = delta.get("content") if isinstance(delta, dict) else None
    return ChatDelta(
        text=text if isinstance(text, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        timings=read(Timings, timings) if isinstance(timings, dict) and "ttft_s" in timings else None,
        model=model if isinstance(model, str) else None,
    )
