"""Servers on the network: what is sent to them, and what they cannot do."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from app.tools.config import ServerConfig, ToolsError
from app.tools.toolbox import Toolbox
from app.tools.web import _Events

MENDED: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda raw: raw.replace(b"hello", rb"\ud83d hello"),
    "latin": lambda raw: raw.replace(b"hello", b"\xe9 hello"),
    "mark": lambda raw: raw if b"data" in raw else b"\xef\xbb\xbf" + raw,
    "nobody": lambda raw: re.sub(rb'"id": \d+', b'"id": 999', raw),
}
PACKED = gzip.compress(b" " * 2**26)
DAMAGE = MENDED | {"cut": lambda raw: raw[:60], "nested": lambda raw: raw.replace(b'"hello"', b"[" * 100_000)}
TOOL = {"name": "echo", "description": "Says it.", "inputSchema": {"type": "object"}}


class Handler(BaseHTTPRequestHandler):
    """Answers each message with JSON; `kind` of its server says how it misbehaves in a call."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(405, b"")

    def do_DELETE(self) -> None:
        self._send(405, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        assert self.headers.get("accept-encoding") == "identity"
        server.seen.append((message["method"], self.headers.get("authorization")))
        if "id" not in message:
            self._send(202, b"")
            return
        results = {
            "initialize": {
                "protocolVersion": message.get("params", {}).get("protocolVersion"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "web", "version": "1"},
            },
            "tools/list": {"tools": [TOOL]},
            "tools/call": {"content": [{"type": "text", "text": "hello"}]},
        }
        if message["method"] == "tools/call" and server.kind == "redirect":
            self.send_response(307)
            self.send_header("location", "http://127.0.0.1:9/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if message["method"] == "tools/call" and server.kind == "endless":
            self._endless()
            return
        body = {"jsonrpc": "2.0", "id": message["id"], "result": results.get(message["method"], {})}
        raw = json.dumps(body).encode()
        if message["method"] == "tools/call" and (damage := DAMAGE.get(message["params"]["arguments"].get("as", ""))):
            raw = damage(raw)
        if server.kind == "events":
            raw = b"event: message\ndata: " + raw + b"\n\n"
        packed = message["params"].get("arguments", {}).get("as") == "packed" if "params" in message else False
        kind = "text/event-stream" if server.kind == "events" else "application/json"
        self._send(200, PACKED if packed else raw, kind, "gzip" if packed else None)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 2**20)
        except OSError:
            self.close_connection = True

    def _send(self, status: int, body: bytes, kind: str = "application/json", encoding: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if encoding is not None:
            self.send_header("content-encoding", encoding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def web() -> Iterator[Callable[[str], tuple[Any, Toolbox]]]:
    """Starts a server, and connects to it."""
    made: list[tuple[Any, Toolbox]] = []

    def start(kind: str) -> tuple[Any, Toolbox]:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.kind, server.seen = True, kind, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        box = Toolbox([ServerConfig(name="web", url=url, headers={"Authorization": "Bearer header-secret"})])
        made.append((server, box))
        box.open()
        deadline = time.monotonic() + 30
        while not box.settled and time.monotonic() < deadline:
            time.sleep(0.02)
        return server, box

    yield start
    for server, box in made:
        box.close()
        server.shutdown()
        server.server_close()


def test_a_server_on_the_network(web: Callable[[str], tuple[Any, Toolbox]]) -> None:
    server, box = web("good")
    assert (box.servers[0].state, box.servers[0].problem) == ("ready", "")
    assert box.call(box.tools[0], {}).result(20).text == "hello"
    assert [method for method, _ in server.seen][:3] == ["initialize", "notifications/initialized", "tools/list"]
    assert {header for _, header in server.seen} == {"Bearer header-secret"}


@pytest.mark.parametrize("kind", ["good", "events"])
def test_an_answer_is_mended_or_an_error_of_its_call_alone(
    web: Callable[[str], tuple[Any, Toolbox]], kind: str
) -> None:
    _, box = web(kind)
    for damage in MENDED:
        assert box.call(box.tools[0], {"as": damage}).result(20).text.endswith("hello")
    for damage in ("cut", "nested", "packed"):
        tracemalloc.start()
        with pytest.raises(ToolsError, match=r"^web answered the call of echo with something unreadable: "):
            box.call(box.tools[0], {"as": damage}).result(20)
        assert tracemalloc.get_traced_memory()[1] < 12e6
        tracemalloc.stop()
    assert box.call(box.tools[0], {}).result(20).text == "hello"


@pytest.mark.parametrize("kind", ["redirect", "endless"])
def test_what_it_cannot_do_costs_a_sentence(web: Callable[[str], tuple[Any, Toolbox]], kind: str) -> None:
    _, box = web(kind)
    with pytest.raises(ToolsError, match=r"^web |of web failed") as caught:
        box.call(box.tools[0], {}).result(30)
    assert "header-secret" not in str(caught.value)
    assert len(str(caught.value)) < 400


async def test_events_without_end_are_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    class Flood(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b": ping\n\n"

    monkeypatch.setattr("app.tools.pipe.asyncio.sleep", wait)
    monkeypatch.setattr("app.tools.pipe.MESSAGES_PER_S", 0.001)
    assert b"".join([part async for part in _Events(Flood(), None)]) == b": ping\n\n" * 1000
    assert len(waits) >= 1000


def test_no_server_there_is_a_sentence() -> None:
    box = Toolbox([ServerConfig(name="web", url="http://127.0.0.1:9/mcp")])
    box.open()
    while not box.settled:
        time.sleep(0.02)
    assert box.servers[0].state == "failed"
    assert box.servers[0].problem.startswith("web ")
    box.close()
