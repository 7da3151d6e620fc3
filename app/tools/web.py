"""Web: a server on the network, over streamable HTTP.

The official client does the protocol; here its responses get a limit. Redirects to another origin are not followed, so
headers go nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import httpx2
from mcp.client.streamable_http import streamable_http_client

from app.tools.config import ServerConfig

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_BODY = 2**22
"""Most bytes of a response that is no stream of events; one event has the client's own limit."""
CONNECT_S = 20.0


class _Limited(httpx2.AsyncByteStream):
    """A body of limited length."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for chunk in self._body:
            if (count := count + len(chunk)) > MAX_BODY:
                raise httpx2.ReadError(f"the response has more than {MAX_BODY:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection."""
        await self._body.aclose()


class _Transport(httpx2.AsyncHTTPTransport):
    """Limits bodies."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request."""
        response = await super().handle_async_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Limited(cast("httpx2.AsyncByteStream", response.stream))
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
