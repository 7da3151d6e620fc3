"""Web: a server on the network, over streamable HTTP.

The official client does the protocol; here its responses get a limit, come uncompressed, and are mended as far as that
is possible, so that one that can't be read costs one request. Redirects to another origin are not followed, so headers
go nowhere else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import httpx2
from mcp.client.streamable_http import streamable_http_client

from app.tools.config import ServerConfig
from app.tools.contents import message_of, read_message
from app.tools.pipe import Pace

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_BODY = 2**22
"""Most bytes of a response, or of a line of a stream of events."""
CONNECT_S = 20.0
PLAIN = "identity"


class _Body(httpx2.AsyncByteStream):
    """A body of limited length.

    Args:
        body: As it comes.
        asked: Id of the request that it answers, for JSON; None for something else.
    """

    def __init__(self, body: httpx2.AsyncByteStream, asked: Any) -> None:
        self._body, self._asked = body, asked

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = bytearray()
        async for chunk in self._body:
            content += chunk
            if len(content) > MAX_BODY:
                raise httpx2.StreamError(f"the response has more than {MAX_BODY:,} bytes")
        yield bytes(content) if self._asked is None else _answer(bytes(content), self._asked)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._body.aclose()


class _Events(_Body):
    """A stream of events, each line of limited length, and none too fast."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest, pace = b"", Pace()
        async for chunk in self._body:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                await pace.keep(not line.strip(), len(line))  # an empty line ends an event
                yield _event(line) + b"\n"
            if len(rest) > MAX_BODY:
                raise httpx2.StreamError(f"an event has more than {MAX_BODY:,} bytes")
        yield _event(rest)


class _Refused(httpx2.AsyncByteStream):
    """Takes the place of a body that is not read."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise httpx2.StreamError(self._why)
        yield b""  # type: ignore[unreachable]  # makes a generator


def _answer(content: bytes, asked: Any) -> bytes:
    """A message, mended.

    Args:
        content: JSON.
        asked: Id of the request that it answers, if that is known.
    """
    try:
        message = message_of(read_message(content))
    except ValueError as error:
        raise httpx2.StreamError(f"it is not JSON: {error}") from None
    if message is None:
        raise httpx2.StreamError("it is not a message")
    written = message.model_dump(by_alias=True, exclude_unset=True)
    return json.dumps({**written, "id": asked} if asked is not None and "method" not in written else written).encode()


def _event(line: bytes) -> bytes:
    """A line of a stream of events; a message in it is mended."""
    if line.startswith(b"data:"):
        with contextlib.suppress(httpx2.StreamError):  # the client says so itself
            return b"data: " + _answer(line[5:], None)
    return line


class _Transport(httpx2.AsyncHTTPTransport):
    """Limits and mends bodies."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request."""
        request.headers["accept-encoding"] = PLAIN
        response = await super().handle_async_request(request)
        packed = response.headers.get("content-encoding", "").strip().lower()
        if packed not in ("", PLAIN):  # a few compressed bytes can fill the memory
            await response.aclose()
            refused = _Refused(f"it is compressed ({packed[:40]}) although it was asked not to")
            return httpx2.Response(200, headers={"content-type": "application/json"}, stream=refused)
        kind = response.headers.get("content-type", "").lower()
        body = cast("httpx2.AsyncByteStream", response.stream)
        asked = None
        if kind.startswith("application/json") and request.method == "POST":
            asked = json.loads(request.content).get("id")
        response.stream = _Events(body, None) if kind.startswith("text/event-stream") else _Body(body, asked)
        return response


@asynccontextmanager
async def web(config: ServerConfig, silence_s: float) -> AsyncIterator[TransportStreams]:
    """Connect to a server.

    Args:
        config: The server.
        silence_s: Longest silence of a response in seconds.
    """
    limits = httpx2.Timeout(CONNECT_S, read=silence_s)
    async with (
        httpx2.AsyncClient(headers=dict(config.headers), timeout=limits, transport=_Transport()) as http,
        streamable_http_client(config.url, http_client=http) as streams,
    ):
        yield streams
