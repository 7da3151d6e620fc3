"""The UI with a remote server: chosen by setting or dialog, labelled, without the features of our own runtime."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from textual.widgets import Input

from app.tui.messages import LoadAsked

Stage = Callable[..., Any]


class Handler(BaseHTTPRequestHandler):
    """Two models, and one answer, as vLLM gives them. A wrong token is refused."""

    listed = 0
    """How often its models were asked for."""
    gate = threading.Event()
    """Lets answers go on after their first word."""

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
        Handler.listed += 1
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
            self.wfile.flush()
            self.gate.wait(10)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Handler.gate.set()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_server_elsewhere_answers_under_its_own_name(stage: Stage, runtime: Any, address: str) -> None:
    async with stage(runtime, size=(100, 24), endpoint=address, endpoint_token="open") as s:
        await s.shows("big-70b", "remote · 127.0.0.1")
        await s.say("hello")
        await s.shows("Greetings from big-70b.")
        assert s.last.model == "big-70b"
        await s.pilot.press("f4", "f7", "f6")
        assert s.app.screen is s.app.chat, "what only our own runtime has is not offered"
        await s.pilot.press("f2")
        await s.shows("other-8b")
        await s.pilot.press("down", "enter")
        await s.until(lambda: s.app.session.status.model == "other-8b", "the other model")
        Handler.gate.clear()
        await s.ask("hello again")
        await s.until(lambda: s.last.text == "Greetings ")
        before = Handler.listed
        await s.app.session.refresh()
        assert Handler.listed == before, "some end an answer when they are asked something"
        Handler.gate.set()
        await s.answered()
        await s.shows("Greetings from other-8b.")
        await s.app.session.refresh()
        assert Handler.listed > before
    assert not runtime.calls, "our own runtime was never asked"


async def test_back_on_this_machine_its_own_model_is_loaded_again(stage: Stage, runtime: Any, address: str) -> None:
    async with stage(runtime, size=(100, 24), model=None, endpoint_token="open", ready=False) as s:
        session = s.app.session
        await s.until(lambda: session.status)
        s.app.post_message(LoadAsked("tiny-3bit"))
        await s.ready()
        await s.say("hello")
        for _ in range(3):
            assert session.recent.last_speed
            for endpoint, model in ((address, "big-70b"), (None, "tiny-3bit")):
                late = asyncio.Event()
                asking = asyncio.create_task(hold_status(s, late))  # its answer comes when another server is in use
                await asyncio.sleep(0)
                session.settings = session.settings.changed({"endpoint": endpoint})
                await session.switch()
                late.set()
                await asking
                assert (session.status.model, session.ready) == (model, True)
                assert session.recent.last_speed is None, "it was another model's"
            session.end_chat()
            await s.say("hello")


async def hold_status(s: Any, until: asyncio.Event) -> None:
    """Ask for the status, which is given late."""
    client = s.app.session.client()
    status = await client.status()

    async def late() -> Any:
        del client.status
        await until.wait()
        return status

    client.status = late
    await s.app.session.refresh()


async def test_a_chat_of_a_model_that_is_not_there_says_so(stage: Stage, runtime: Any, address: str) -> None:
    async with stage(runtime, size=(100, 24), endpoint=address, endpoint_token="open") as s:
        s.app.session.note(s.app.session.conversation, model="demo")
        await s.say("hello")
        assert s.last.state == "failed"
        assert "has no model demo: it has big-70b, other-8b; F2 picks another model for this chat" in s.last.error
        await s.pilot.press("f2")
        await s.shows("other-8b")
        await s.pilot.press("down", "enter")
        await s.until(lambda: s.app.session.status.model == "other-8b")
        await s.pilot.press("ctrl+r")
        await s.until(lambda: s.last.text == "Greetings from other-8b.")


async def test_what_only_our_own_runtime_has_is_not_shown(stage: Stage, runtime: Any, address: str) -> None:
    async with stage(runtime, size=(100, 40), endpoint=address, endpoint_token="open") as s:
        await s.say("hello")
        await s.hides("· tokens")
        await s.pilot.press("ctrl+up", "t")
        await s.shows("C copy")
        await s.hides("T tokens")
        assert s.app.screen is s.app.chat
        await s.pilot.press("f3")
        await s.shows("generates the answers", "system prompt")
        for key in ("budget", "k_chunk", "kv", "context", "backend", "gamma"):
            assert not s.app.screen.query(f"#setting-{key}"), key
        field = s.app.screen.query_one("#setting-temperature Input")
        field.value = "0.3"
        await s.pilot.press("escape")
        await s.until(lambda: s.app.session.settings.temperature == 0.3)
        await s.click("#header-device")
        await s.shows("Address of an OpenAI")
        s.app.screen.query_one("#endpoint-url", Input).value = ""
        await s.pilot.press("enter")
        await s.ready()
        await s.until(lambda: s.app.session.status.model == "demo", "this machine again")
        await s.pilot.press("f3")
        await s.until(lambda: s.app.screen.query("#setting-budget"), "the budget")


async def test_a_wrong_token_is_told_and_can_be_put_right(
    stage: Stage, runtime: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}
    async with stage(runtime, size=(100, 24), ready=False) as s:
        monkeypatch.setattr(s.app, "keep_settings", kept.update)
        await s.ready()
        s.app.action_endpoint()
        await s.shows("Address of an OpenAI")
        url, token = s.app.screen.query(Input)
        url.value = "gpu:8000"
        await s.pilot.press("enter")
        await s.shows("enter http")
        url.value, token.value = "http://gpu:8000", "wrong"
        await s.pilot.press("enter")
        await s.shows("unencrypted")
        url.value = address
        await s.pilot.press("enter")
        await s.shows("rejected the token")
        s.app.action_endpoint()
        await s.shows("Address of an OpenAI")
        s.app.screen.query_one("#endpoint-token", Input).value = "open"
        await s.pilot.press("enter")
        await s.shows("big-70b")
        assert kept == {"endpoint": address, "endpoint_token": "open"}
        s.app.action_endpoint()
        await s.shows("Address of an OpenAI")
        s.app.screen.query_one("#endpoint-url", Input).value = ""
        await s.pilot.press("enter")
        await s.ready()
        await s.until(lambda: s.app.session.status.model == "demo", "this machine again")
