"""A server elsewhere as the runtime: what is sent, what is understood, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "server"))
from fake_engine import make_service

from app.errors import ClientError, ConnectionLostError, ContextLengthError
from app.protocol import ChatOptions
from app.remote import RemoteClient, RemoteSupervisor, endpoint_problem
from runtime.server.listening import bind, listen
from runtime.server.security import Security
from runtime.wire.requests import LoadRequest

MODELS = {"object": "list", "data": [{"id": "big-70b", "max_model_len": 32768}, {"id": "small"}]}
HELLO = [{"role": "user", "content": "hi"}]


def server(asked: list[httpx.Request], *events: Any, models: Any = MODELS) -> Callable[..., RemoteClient]:
    """A client of a server of this kind: what it lists, and the events of its answers."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.path.endswith("/v1/models"):
            return httpx.Response(200, json=models)
        lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text=": ping\n\n" + "".join(lines), headers={"content-type": "text/event-stream"})

    return lambda url="http://gpu:8000/v1", token="secret": RemoteClient(
        url, token, transport=httpx.MockTransport(answer)
    )


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"model": "big-70b", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


async def text_of(client: RemoteClient, **options: Any) -> str:
    return "".join([delta.text async for delta in client.chat(HELLO, ChatOptions(**options))])


async def test_it_answers_with_the_first_model_or_the_one_that_was_picked() -> None:
    asked: list[httpx.Request] = []
    llama_timings = {"predicted_ms": 5.0}  # llama.cpp's own, of another shape than ours
    usage = {"choices": [], "usage": {"prompt_tokens": 3}}
    client = server(asked, chunk("Hel"), chunk("lo", "stop", timings=llama_timings), usage, "[DONE]")()
    status = await client.status()
    assert (status.state, status.model, status.context, status.backend) == (
        "ready",
        "big-70b",
        32768,
        "remote · gpu:8000",
    )
    assert await text_of(client, top_k=0, min_p=0.0, temperature=0.5, chat="secret-name") == "Hello"
    body = json.loads(asked[-1].content)
    assert body == {"model": "big-70b", "messages": HELLO, "stream": True, "temperature": 0.5}
    assert asked[-1].headers["authorization"] == "Bearer secret"
    assert str(asked[-1].url) == "http://gpu:8000/v1/chat/completions"
    assert [report async for report in client.load(LoadRequest(model="small"))] == []
    assert (await client.status()).model == "small"
    assert [(one.name, one.loaded) for one in await client.models()] == [("big-70b", False), ("small", True)]
    with pytest.raises(ClientError, match="gpu:8000 has no model other: it has big-70b, small"):
        [report async for report in client.load(LoadRequest(model="other"))]
    await client.aclose()


async def test_a_path_before_v1_and_no_token() -> None:
    asked: list[httpx.Request] = []
    client = server(asked, chunk("x", "stop"))("https://host/api/v1/", "")
    await text_of(client)
    assert str(asked[-1].url) == "https://host/api/v1/chat/completions"
    assert "authorization" not in asked[-1].headers


@pytest.mark.parametrize(
    ("status", "said"), [(401, "gpu:8000 refuses the token"), (404, "does not speak OpenAI's protocol"), (500, "boom")]
)
async def test_errors_are_told_in_words(status: int, said: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json={"error": {"message": "boom"}}))
    client = RemoteClient("http://gpu:8000", "t", transport=transport)
    with pytest.raises(ClientError, match=said):
        await client.status()


async def test_an_answer_that_breaks_off_names_the_server() -> None:
    client = server([], chunk("Hel"), "[DONE]")()
    with pytest.raises(ConnectionLostError, match="broke off: the server at gpu:8000 stopped before the end"):
        await text_of(client, model="big-70b")
    await client.aclose()


async def test_nobody_there() -> None:
    port = bind("127.0.0.1", 0)
    address = f"127.0.0.1:{port.getsockname()[1]}"
    port.close()
    supervisor = RemoteSupervisor(f"http://{address}", "")
    with pytest.raises(ConnectionLostError, match=f"the server at {address} cannot be reached"):
        await supervisor.ensure()
    with pytest.raises(ClientError, match="begins with http"):
        await RemoteSupervisor("gpu:8000", "").ensure()


@pytest.mark.parametrize(
    ("url", "problem"),
    [("http://h", None), ("https://h:1/v1", None), ("ftp://h", "begins with"), ("http://u:p@h", "password"),
     ("http://h:x", "not an address")],
)  # fmt: skip
def test_addresses(url: str, problem: str | None) -> None:
    found = endpoint_problem(url)
    assert found is None if problem is None else problem in (found or "")


async def test_our_own_server_is_one_too() -> None:
    """Without a management token, as `serve` runs: what the UI needs of it is OpenAI's protocol alone."""
    service, _ = make_service()
    listener = bind("127.0.0.1", 0)
    stop, started = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(listen(service, Security(token="t"), listener, stop, started.set))
    await started.wait()
    supervisor = RemoteSupervisor(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "t")
    client = await supervisor.ensure()
    assert (await client.status()).state == "ready"
    [_ async for _ in client.load(LoadRequest(model="small"))]
    said = [delta async for delta in client.chat([{"role": "user", "content": "echo hello there"}], ChatOptions())]
    assert "".join(delta.text for delta in said) == "hello there"
    assert said[-1].timings is not None, "our own timings are understood"
    await supervisor.close()
    stop.set()
    assert await serving


@pytest.mark.parametrize(
    "told",
    [
        {"message": "request (2841 tokens) exceeds the available context size (1024 tokens), try increasing it"},
        {"message": "This model's maximum context length is 2048 tokens. However, you requested 2060 tokens"},
        {"message": "too much", "code": "context_length_exceeded"},
    ],
)
async def test_what_does_not_fit_is_known_by_the_words_of_servers(told: dict[str, Any]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/v1/models"):
            return httpx.Response(200, json=MODELS)
        return httpx.Response(400, json={"error": {"type": "any", **told}})

    client = RemoteClient("http://gpu:8000/v1", "", transport=httpx.MockTransport(refuse))
    await client.status()
    with pytest.raises(ContextLengthError):
        await text_of(client)
