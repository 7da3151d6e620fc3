"""Streaming responses (server-sent events), and work that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from runtime.server.answer import error_body
from runtime.server.errors import api_error

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any], None]
DONE = "[DONE]"
"""End marker of an OpenAI stream."""
PATIENCE_S = 2.0
"""Seconds for which a stream's status waits for an early error; after that it is 200, and errors go into the stream."""


class Disconnected(Exception):
    """The client disconnected before the response was ready."""


def encode(body: Any) -> str:
    """JSON on one line in ASCII: some clients treat U+0085 or U+2028 as the end of a line, and thus of the event."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


async def sse(
    events: Events, *, ping_s: float, done: bool, named: bool = False, patience_s: float = PATIENCE_S
) -> Response:
    """A response that sends events as they arrive.

    Args:
        events: The events, as JSON objects. Closed when the client disconnects.
        ping_s: Seconds between keep-alive comments.
        done: Whether `[DONE]` ends the stream.
        named: Whether each event is named by its `type`.
        patience_s: How long an error before the first event can still set the status of the response.

    Raises:
        Exception: raised by the events before the first of them, within `patience_s`.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await asyncio.wait([first], timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        await _abandon(first, events)
        raise
    return EventSourceResponse(
        _lines(first, events, done=done, named=named),
        ping=ping_s,
        sep="\n",
        ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
    )


async def _lines(
    first: asyncio.Future[dict[str, Any] | None], events: Events, *, done: bool, named: bool
) -> AsyncGenerator[ServerSentEvent, None]:
    """Events as lines of the stream; an error becomes the last one."""
    try:
        event = await first
        while event is not None:
            yield _event(encode(event), event["type"] if named else None)
            event = await _next(events)
        if done:
            yield _event(DONE)
    except Exception as error:  # noqa: BLE001 -- the status is sent already, so the error goes into the stream
        body = error_body(api_error(error))
        yield _event(encode({"type": "error", **body} if named else body), "error" if named else None)
    finally:
        await _abandon(first, events)


def _event(data: str, name: str | None = None) -> ServerSentEvent:
    """One event: its name if any, `data: ...` and an empty line."""
    return ServerSentEvent(data, event=name, sep="\n")


async def _next(events: Events) -> dict[str, Any] | None:
    """The next event, or None at the end."""
    return await anext(events, None)


async def _abandon(first: asyncio.Future[dict[str, Any] | None], events: Events) -> None:
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
