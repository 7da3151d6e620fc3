"""The UI with a server elsewhere: chosen by setting or dialog, labelled, and without what only our runtime has."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from textual.widgets import Input

Stage = Callable[..., Any]


class Handler(BaseHTTPRequestHandler):
    """Two models, and one answer, as vLLM gives them. A wrong token is refused."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == "Bearer open":
            return True
        self._send(401, {"error": {"message": "who are you?"}})
        return False

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self._allowed():
            self._send(200, {"data": [{"id": "big-70b", "max_model_len": 4096}, {"id": "other-8b"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text, finish in (("Greetings ", None), (f"from {asked['model']}.", None), ("", "stop")):
            part = {"model": asked["model"], "choices": [{"delta": {"content": text}, "finish_reason": finish}]}
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_server_elsewhere_answers_under_its_own_name(stage: Stage, runtime: Any, address: str) -> None:
    async with stage(runtime, size=(100, 24), endpoint=address, endpoint_token="open") as s:
        await s.ready()
        await s.shows("big-70b")
        await s.shows("remote · 127.0.0.1")
        await s.ask("hello")
        await s.answered()
        await s.shows("Greetings from big-70b.")
        assert s.last.model == "big-70b"
        await s.pilot.press("f4", "f7", "f6")
        assert s.app.screen is s.app.chat, "what only our own runtime has is not offered"
        await s.pilot.press("f2")
        await s.shows("other-8b")
        await s.pilot.press("down", "enter")
        await s.until(lambda: s.app.session.status.model == "other-8b", "the other model")
        await s.ask("hello again")
        await s.answered()
        await s.shows("Greetings from other-8b.")
    assert not runtime.calls, "our own runtime was never asked"


async def test_a_wrong_token_is_told_and_can_be_put_right(
    stage: Stage, runtime: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}
    async with stage(runtime, size=(100, 24)) as s:
        monkeypatch.setattr(s.app, "keep_settings", kept.update)
        await s.ready()
        s.app.action_endpoint()
        await s.shows("Address of a server")
        url, token = s.app.screen.query(Input)
        url.value = "gpu:8000"
        await s.pilot.press("enter")
        await s.shows("begins with http")
        url.value, token.value = address, "wrong"
        await s.pilot.press("enter")
        await s.shows("refuses the token")
        s.app.action_endpoint()
        await s.shows("Address of a server")
        s.app.screen.query_one("#endpoint-token", Input).value = "open"
        await s.pilot.press("enter")
        await s.shows("big-70b")
        assert kept == {"endpoint": address, "endpoint_token": "open"}
        s.app.action_endpoint()
        await s.shows("Address of a server")
        s.app.screen.query_one("#endpoint-url", Input).value = ""
        await s.pilot.press("enter")
        await s.ready()
        await s.until(lambda: s.app.session.status.model == "demo", "this machine again")
