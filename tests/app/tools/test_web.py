"""Servers on the network: what is sent to them, and what they cannot do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from app.tools.config import ServerConfig, ToolsError
from app.tools.toolbox import Toolbox

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
        self._send(200, json.dumps(body).encode())

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 2**20)
        except OSError:
            self.close_connection = True

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
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


@pytest.mark.parametrize("kind", ["redirect", "endless"])
def test_what_it_cannot_do_costs_a_sentence(web: Callable[[str], tuple[Any, Toolbox]], kind: str) -> None:
    _, box = web(kind)
    with pytest.raises(ToolsError, match=r"^web |of web failed") as caught:
        box.call(box.tools[0], {}).result(30)
    assert "header-secret" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_server_there_is_a_sentence() -> None:
    box = Toolbox([ServerConfig(name="web", url="http://127.0.0.1:9/mcp")])
    box.open()
    while not box.settled:
        time.sleep(0.02)
    assert box.servers[0].state == "failed"
    assert box.servers[0].problem.startswith("web ")
    box.close()
