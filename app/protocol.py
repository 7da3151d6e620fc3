"""The client's protocol: OpenAI-style chats, and responses and errors parsed from JSON. Cheap to import."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import ClientError, ConnectionLostError, ProtocolError, answer_error
from app.language import _
from app.reports import reported
from runtime.system.foreign import read_json
from runtime.wire.answers import STATUS_OF_CODE, Timings
from runtime.wire.codec import WireError, from_json

if TYPE_CHECKING:
    import httpx

R = TypeVar("R")
MAX_MESSAGE = 1000
"""Maximum length in characters of a server's error message."""
MAX_NAME = 300
"""Maximum length in characters of a model's name."""
MAX_CALLS = 64
"""Maximum number of calls in an answer."""
MAX_IDLE = 100_000
"""Maximum number of an answer's events that bring nothing."""
MAX_STREAM = 2**30
"""Maximum size of a stream of events in bytes."""
LONGEST_ANSWER_S = 86_400.0
"""Maximum time of an answer in seconds."""
_STEPS = 20
"""Parts in which a wait is counted; time for which the process was stopped falls into one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of an answer. None leaves the choice to the runtime."""

    model: str | None = None
    """The model to use; None for the loaded one, or the last one loaded through this client."""
    temperature: float | None = None
    """Sampling temperature; 0 picks the most likely token."""
    top_p: float | None = None
    """Cumulative probability of the tokens sampled from."""
    top_k: int | None = None
    """Maximum number of tokens sampled from; 0 for all."""
    min_p: float | None = None
    """Minimum probability relative to the most likely token."""
    repetition_penalty: float | None = None
    """Repetition penalty: divides the logits of tokens that have already occurred."""
    max_tokens: int | None = None
    """Maximum length of the answer in tokens."""
    seed: int | None = None
    """Seed that makes sampling repeatable."""
    stop: Sequence[str] | None = None
    """Stop sequences."""
    end_loops: bool | None = None
    """Whether an answer that only repeats itself ends, with `loop` as its reason."""
    reasoning_in_content: bool | None = None
    """Whether reasoning is part of the answer's text, between its tags; else it is left out."""
    chat: str | None = None
    """The conversation's name in the runtime; `RuntimeClient.forget` takes it."""
    response_format: Mapping[str, Any] | None = None
    """Form of the answer, in OpenAI's format; see `schema_format`."""
    continue_final: bool = False
    """Whether to continue the last message, the assistant's, instead of answering it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's format."""
    chat_template_kwargs: Mapping[str, bool | str] | None = None
    """Variables of the model's chat template, by vLLM's name for them."""


def schema_format(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `response_format` of JSON that fits a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a call."""

    index: int
    """Its number among the answer's calls."""
    id: str = ""
    """In the first piece."""
    name: str = ""
    """In the first piece."""
    arguments: str = ""
    """More of the arguments' JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of an answer."""

    text: str
    """The added text; may be empty."""
    finish_reason: str | None = None
    """`stop`, `length` or `loop`; in the last piece only."""
    timings: Timings | None = None
    """Statistics; in the last piece only."""
    model: str | None = None
    """The model that answers."""
    calls: Sequence[CallDelta] = ()
    """Pieces of calls."""


def status_error(status: int, content: bytes) -> ClientError:
    """The error of a response with an error status."""
    try:
        body = read_json(content)
    except ValueError:
        body = None
    return _error(status, body if isinstance(body, dict) else {})


def stream_error(event: Mapping[str, Any]) -> ClientError:
    """The error of a stream's error event, which has no status; its code determines the class."""
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
        reported(message[:MAX_MESSAGE])
        if isinstance(message, str) and message
        else _("the runtime answered with status {status}", status=status),
        param=param[:MAX_MESSAGE] if isinstance(param, str) else None,
        code=code[:MAX_MESSAGE] if isinstance(code, str) else None,
    )


def read_object(data: str | bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        body = read_json(data)
    except ValueError as error:
        raise ProtocolError(_("the runtime answered with something that is not JSON: {error}", error=error)) from error
    if not isinstance(body, dict):
        raise ProtocolError(_("the runtime answered with something that is not a JSON object"))
    return body


def read_items(value: object) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError(_("the runtime's response lacks a list"))
    return value


def read(kind: type[R], value: object) -> R:
    """A record of the wire.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return from_json(kind, value)
    except WireError as error:
        raise ProtocolError(_("the runtime's response can't be read: {error}", error=error)) from error


def read_delta(choice: Mapping[str, Any], timings: object, model: object = None) -> ChatDelta:
    """One choice of a chunk."""
    delta, finish = _delta(choice), choice.get("finish_reason")
    text = delta.get("content")
    return ChatDelta(
        text=text if isinstance(text, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        timings=_timings(timings),
        model=model[:MAX_NAME] if isinstance(model, str) else None,
        calls=_calls(delta.get("tool_calls")),
    )


class AnswerLimits:
    """Limits of an answer that comes in pieces, so that none goes on for ever.

    Args:
        who: Name of the other side.
        patience_s: Maximum time of events that bring nothing, in seconds; None for no limit.
    """

    def __init__(self, who: str, patience_s: float | None) -> None:
        self._who, self._patience_s = who, patience_s
        self._begin = self._since = time.monotonic()
        self._idle = self._calls = 0

    def check(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Count an event. Reasoning, which is not shown, counts as part of the answer.

        Raises:
            ClientError: it is one too many, or comes too late.
        """
        now = time.monotonic()
        given = [value for one in choices for key, value in _delta(one).items() if key != "role"]
        if any(isinstance(one, str | list) and one for one in given):
            self._since = now
        else:
            self._idle += 1
        if self._idle > MAX_IDLE or (self._patience_s is not None and now - self._since > self._patience_s):
            raise ConnectionLostError(_("{who} sends events but no answer", who=self._who))
        if now - self._begin > LONGEST_ANSWER_S:
            raise ProtocolError(
                _(
                    "{who} needs more than {most:,.0f} s for an answer",
                    who=self._who,
                    most=LONGEST_ANSWER_S,
                )
            )

    def count(self, calls: Sequence[CallDelta]) -> None:
        """Count the calls that begin with these pieces.

        Raises:
            ProtocolError: they are too many.
        """
        for call in calls:
            self._calls += bool(call.name) or call.index >= self._calls
        if self._calls > MAX_CALLS:
            raise ProtocolError(_("{who} calls more than {most} tools in one answer", who=self._who, most=MAX_CALLS))


def _delta(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a choice adds; the text itself in a completion."""
    found = choice.get("delta") or {"content": choice.get("text")}
    return found if isinstance(found, dict) else {}


def _calls(found: object) -> Sequence[CallDelta]:
    """Pieces of calls; malformed ones are ignored.

    Raises:
        ProtocolError: there are too many.
    """
    calls = []
    if isinstance(found, list) and len(found) > MAX_CALLS:
        raise ProtocolError(_("the runtime calls more than {most} tools in one answer", most=MAX_CALLS))
    for at, one in enumerate(found if isinstance(found, list) else ()):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(function, dict):
            continue
        index = one.get("index")
        id_, name, arguments = one.get("id"), function.get("name"), function.get("arguments")
        calls.append(
            CallDelta(
                index=index if type(index) is int and 0 <= index < MAX_CALLS else at,
                id=id_[:MAX_NAME] if isinstance(id_, str) else "",
                name=name[:MAX_NAME] if isinstance(name, str) else "",
                arguments=arguments if isinstance(arguments, str) else "",
            )
        )
    return calls


def _timings(found: object) -> Timings | None:
    """The runtime's timings. Those of other servers have another form and are ignored."""
    try:
        return from_json(Timings, found)
    except WireError:
        return None


def check_place(response: httpx.Response, who: str) -> None:
    """Refuse a redirect, since the token and the messages are not meant for another address.

    Raises:
        ProtocolError: the response is a redirect.
    """
    if (onward := response.next_request) is not None:
        there = f"{onward.url.scheme}://{onward.url.netloc.decode('ascii')}"
        raise ProtocolError(
            _(
                "{who} redirects to {there}, which is not followed; if that address is the right one, set it as the "
                "endpoint",
                who=who,
                there=there,
            )
        )


async def read_body(response: httpx.Response, most: int) -> bytes:
    """A body, or slightly more than its first `most` bytes."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > most:
            break
    return bytes(content)


async def event_data(
    response: httpx.Response, who: str, *, most: int, silence_s: float, patience_s: float | None
) -> AsyncGenerator[str, None]:
    """The data of a stream of events, as they arrive. Comments and names are skipped.

    Args:
        response: The stream.
        who: Name of the other side.
        most: Maximum length of a line in bytes.
        silence_s: Maximum wait in seconds for anything.
        patience_s: Maximum wait in seconds for data while only keep-alives arrive; None for no limit.

    Raises:
        ConnectionLostError: the network failed, or only keep-alives arrived.
        ProtocolError: a line or the stream is too long, or the stream cannot be read.
    """
    waiting, total, since = bytearray(), 0, time.monotonic()
    with translated(who):
        chunks = response.aiter_bytes()
        while (chunk := await _within(silence_s, chunks)) is not None:
            at = len(waiting)
            waiting += chunk
            if (total := total + len(chunk)) > MAX_STREAM:
                raise ProtocolError(_("{who} sent a stream of more than {most:,} bytes", who=who, most=MAX_STREAM))
            while (end := waiting.find(b"\n", at)) >= 0:
                line = bytes(waiting[:end])
                del waiting[: end + 1]
                at = 0
                if line.startswith(b"data:"):
                    yield _data(line)
                    since = time.monotonic()
            if len(waiting) > most:
                raise ProtocolError(_("{who} sent a line of more than {most:,} bytes", who=who, most=most))
            if patience_s is not None and time.monotonic() - since > patience_s:
                raise ConnectionLostError(_("{who} sends keep-alives but no answer", who=who))
    if waiting.startswith(b"data:"):
        yield _data(waiting)


async def _within(silence_s: float, chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next chunk; None after the last one. Time for which this process was stopped does not count.

    Raises:
        TimeoutError: there was none in time.
    """
    loop, steps = asyncio.get_running_loop(), iter(range(_STEPS))
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(silence_s / _STEPS, tick)
        if next(steps, None) is None:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(silence_s / _STEPS, tick)
        try:
            return await anext(chunks, None)
        finally:
            timer.cancel()


def _data(line: bytes | bytearray) -> str:
    return line.removeprefix(b"data:").strip().decode("utf-8", "replace")


@contextmanager
def translated(who: str) -> Iterator[None]:
    """Translate network failures into errors of this program."""
    import httpx

    try:
        yield
    except (httpx.TimeoutException, TimeoutError) as error:
        raise ConnectionLostError(_("{who} does not respond ({name})", who=who, name=type(error).__name__)) from error
    except httpx.TransportError as error:
        detail = f": {error}" if str(error) else ""
        raise ConnectionLostError(
            _("{who} can't be reached ({name}{detail})", who=who, name=type(error).__name__, detail=detail)
        ) from error
    except httpx.HTTPError as error:
        raise ProtocolError(_("the response of {who} can't be read: {error}", who=who, error=error)) from error
