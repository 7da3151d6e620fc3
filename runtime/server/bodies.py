"""Bodies of requests and responses: bounded JSON, validated up to the first mistake; errors; streams."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from runtime.server.errors import ApiError, ErrorForm, api_error, form_of, openai_form
from runtime.wire.requests import MAX_MESSAGES

LARGE_BYTES = 32 * 1024
"""Larger bodies are parsed in a thread, so that the event loop does not wait."""
MAX_VALUES = 2**20
"""Most values in a body: as many as the tokens of any prompt."""
MAX_GROUPS = 2**16
"""Most lists and objects among them: each takes some hundred bytes of memory, and time of the garbage collector."""
MISSING, INVALID, NO_JSON = "missing_required_parameter", "invalid_value", "invalid_json"
"""Codes of errors about one field, and about the whole body."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of a JSON text, a whole surrogate pair in one; its group is half a pair."""
_UNION = ("str", "bool", "float", "int")
"""Members of unions that pydantic names in the path of a field."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Items = Annotated[list[T], Field(max_length=MAX_MESSAGES, fail_fast=True)]
"""A list that is validated up to its first mistake, rather than collecting a million errors."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)]
"""A text as token ids."""
Events = AsyncGenerator[dict[str, Any], None]
PING = ServerSentEvent(comment="ping", sep="\n")
DONE = "[DONE]"
"""End marker of an OpenAI stream."""
PATIENCE_S = 2.0
"""Seconds for which a stream's status waits for an early error; after that it is 200, and errors go into the stream."""


def _json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite_number", "Numbers should be finite") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]
"""An object that is passed on unchanged."""


def at_most(count: int) -> BeforeValidator:
    """Limit an object's members before validating them, since that does not stop at the first mistake."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"Object should have at most {count} members")
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads request bodies. Large ones are read one at a time, so that their memory use does not add up."""

    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, request: Request, make: Callable[[bytes], T]) -> T:
        """Parse a body with `make`.

        Raises:
            ApiError: as `make` does.
        """
        body = await request.body()
        if len(body) <= LARGE_BYTES:
            return make(body)
        async with self._alone:
            return await asyncio.to_thread(make, body)


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ApiError: the body is not a JSON object, or is too large.
    """
    if len(body) > LARGE_BYTES:
        _check_values(body)
    try:
        data = from_json(_paired(body.removeprefix(codecs.BOM_UTF8)), allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            message = "lists and objects in the body are nested more than 200 deep: send it in a flatter form"
            raise ApiError(400, message, code=NO_JSON) from None
        raise ApiError(400, f"the body is not JSON: {error}", code=NO_JSON) from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code=NO_JSON)
    return data


def _paired(body: bytes) -> bytes:
    """A body in which U+FFFD stands for halves of surrogate pairs: JavaScript writes them when it cuts an emoji."""
    if _SURROGATE.search(body) is None:
        return body
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)


def _check_values(body: bytes) -> None:
    """Count the values of a body before parsing it: a byte of JSON can become fifty in memory."""
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.bitwise_xor.accumulate(plain == ord('"')) == 0  # of texts
    groups = np.count_nonzero(((plain == ord("[")) | (plain == ord("{"))) & outside)
    values = np.count_nonzero((plain == ord(",")) & outside) + groups
    for count, most, what in ((groups, MAX_GROUPS, "lists and objects"), (values, MAX_VALUES, "values")):
        if count > most:
            raise ApiError(400, f"the body holds {count:,} {what}, but at most {most:,} are read", code=NO_JSON)


def parse(body: bytes, model: type[M]) -> M:
    """Parse and validate a request's body.

    Raises:
        ApiError: it is no JSON object, or a field is missing, of a wrong type or out of range.
    """
    return validated(read_object(body), model)


def validated(given: dict[str, Any], model: type[M]) -> M:
    """Validate a request.

    Raises:
        ApiError: a field is missing, of a wrong type or out of range.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise explained(error) from None


def refused(param: str, message: str, *, code: str | None = None) -> ApiError:
    """An error about a field."""
    return ApiError(400, message, param=param, code=code)


def explained(error: ValidationError, inside: str = "") -> ApiError:
    """A description of the first faulty field; for a union, what each type would require.

    Args:
        error: What pydantic says.
        inside: The place of what was validated in the request, if it was a part of it.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = _field(details[0])
    field = _field(max((one for one in details if _field(one).startswith(first)), key=_place))
    wrong = [detail for detail in details if _field(detail) == field]
    field = ".".join(part for part in (inside, field) if part)
    if wrong[0]["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=field, code=MISSING)
    wanted = " or ".join(dict.fromkeys(detail["msg"] for detail in wrong))
    return ApiError(400, f"{field}: {wanted}", param=field, code=INVALID)


def _place(detail: ErrorDetails) -> tuple[int, ...]:
    """Progress of validation in the types of a union."""
    at = [part for part in detail["loc"] if isinstance(part, int)]
    return len(_field(detail).split(".")) + len(at), *at


def _field(detail: ErrorDetails) -> str:
    """The path of a field in OpenAI's notation, `messages[0].content`, without pydantic's union members."""
    text = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _UNION:
            text += f".{part}" if text else part
    return text


def json_answer(body: Any) -> Response:
    """A JSON response with status 200."""
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


def error_answer(error: ApiError, path: str) -> Response:
    """An error response, as the interface at `path` has it."""
    status, body = form_of(path)(error)
    return JSONResponse(body, status, headers={"Cache-Control": "no-store", **error.headers})


class Disconnected(Exception):
    """The client disconnected before the response was ready."""


def encode(body: Any) -> str:
    """JSON on one line in ASCII: some clients treat U+0085 or U+2028 as the end of a line, and thus of the event."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


async def sse(
    events: Events,
    *,
    ping_s: float,
    done: bool = False,
    named: bool = False,
    form: ErrorForm = openai_form,
    ping: ServerSentEvent = PING,
    patience_s: float = PATIENCE_S,
) -> Response:
    """A response that sends events as they arrive.

    Args:
        events: The events, as JSON objects. Closed when the client disconnects.
        ping_s: Seconds between keep-alive events.
        done: Whether `[DONE]` ends the stream.
        named: Whether each event is named by its `type`.
        form: Writes an error, which becomes the last event.
        ping: The keep-alive event.
        patience_s: How long an error before the first event can still set the status of the response.

    Raises:
        Exception: raised by the events before the first of them, within `patience_s`.
    """
    first = await _begun(events, patience_s)

    async def lines() -> AsyncGenerator[ServerSentEvent, None]:
        async with aclosing(_told(first, events, form, DONE if done else None)) as items:
            async for item in items:
                if isinstance(item, str):
                    yield _event(item)
                else:
                    yield _event(encode(item), item["type"] if named else None)

    return EventSourceResponse(lines(), ping=ping_s, sep="\n", ping_message_factory=lambda: ping)


async def ndjson(events: Events, *, form: ErrorForm, patience_s: float = PATIENCE_S) -> Response:
    """A response that sends objects as they arrive, each on a line; arguments and errors as of `sse`."""
    first = await _begun(events, patience_s)

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(_told(first, events, form)) as items:
            async for item in items:
                yield f"{encode(item)}\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers={"Cache-Control": "no-store"})


async def _begun(events: Events, patience_s: float) -> asyncio.Future[dict[str, Any] | None]:
    """The first event, awaited as long as an error before it can still set the status.

    Raises:
        Exception: that error.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await asyncio.wait([first], timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first, events)
        raise
    return first


async def _told(
    first: asyncio.Future[dict[str, Any] | None], events: Events, form: ErrorForm, end: str | None = None
) -> AsyncGenerator[dict[str, Any] | str, None]:
    """The events and `end`; an error becomes the last one."""
    try:
        event = await first
        while event is not None:
            yield event
            event = await _next(events)
        if end is not None:
            yield end
    except Exception as error:  # noqa: BLE001 -- the status is sent already, so the error goes into the stream
        yield form(api_error(error))[1]
    finally:
        await _cancel(first, events)


def _event(data: str, name: str | None = None) -> ServerSentEvent:
    """One event: its name if any, `data: ...` and an empty line."""
    return ServerSentEvent(data, event=name, sep="\n")


async def _next(events: Events) -> dict[str, Any] | None:
    """The next event, or None at the end."""
    return await anext(events, None)


async def _cancel(first: asyncio.Future[dict[str, Any] | None], events: Events) -> None:
    """Cancel the work behind a stream."""
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await first
    await events.aclose()


async def unless_disconnected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Do work for a waiting client, and cancel it when the client disconnects.

    Raises:
        Disconnected: the client disconnected.
    """
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Wait until the client disconnects; the request's body has already been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
