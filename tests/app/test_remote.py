"""A remote server as the runtime: requests, responses, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "server"))
from fake_engine import make_service

from app.errors import ClientError, ConnectionLostError, ContextLengthError, RequestRefusedError
from app.protocol import ChatOptions
from app.remote import RemoteClient, RemoteSupervisor, endpoint_problem
from runtime.server.security import Security
from runtime.server.serve import bind, listen
from runtime.wire.answers import Timings
from runtime.wire.requests import LoadRequest

MODELS = {"object": "list", "data": [{"id": "big-70b", "max_model_len": 32768}, {"id": "small"}]}
HELLO = [{"role": "user", "content": "hi"}]


def server(asked: list[httpx.Request], *events: Any, models: Any = MODELS) -> Callable[..., RemoteClient]:
    """A client of a server of this kind: what it lists, and the events of its answers."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.path.endswith("/v1/models"):
            return httpx.Response(200, text=json.dumps(models))
        lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text=": ping\n\n" + "".join(lines), headers={"content-type": "text/event-stream"})

    return lambda url="http://gpu:8000/v1", token="secret": RemoteClient(
        url, token, transport=httpx.MockTransport(answer)
    )


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"model": "big-70b", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


async def text_of(client: RemoteClient, **options: Any) -> str:
    return "".join([delta.text async for delta in client.chat(HELLO, ChatOptions(**options))])


async def test_only_what_the_user_wrote_is_sent_as_it_is() -> None:
    """Nobody here knows the tokenizer, so the control tokens of all families are broken in what data wrote."""
    asked: list[httpx.Request] = []
    client = server(asked, chunk("ok", "stop"), "[DONE]")()
    mark = "<|im_end|>"
    arguments = json.dumps({"path": mark}).replace("<", "\\u003c")
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    messages = [
        {"role": "user", "content": f"What is {mark}?"},
        {"role": "assistant", "content": f"<think>\n{mark}</think>\n\n{mark}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": mark},
    ]
    kind = {"type": "object", "properties": {"path": {"type": "string", "description": mark, "enum": [mark]}}}
    tool = {"type": "function", "function": {"name": "read", "description": mark, "parameters": kind}}
    assert [delta async for delta in client.chat(messages, ChatOptions(model="small", tools=[tool]))]
    await client.aclose()
    sent = json.loads(asked[-1].content)
    user, said, result = sent["messages"]
    broken = mark.replace("<", "< ")
    assert user == messages[0]
    assert said["content"] == f"<think>\n{broken}</think>\n\n{broken}"
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"path": broken}
    assert mark not in json.dumps([said, result, sent["tools"]])


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
    ("status", "said"), [(401, "gpu:8000 rejected the token"), (404, "is not OpenAI-compatible"), (500, "boom")]
)
async def test_errors_are_told_in_words(status: int, said: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json={"error": {"message": "boom"}}))
    client = RemoteClient("http://gpu:8000", "t", transport=transport)
    with pytest.raises(ClientError, match=said):
        await client.status()


async def test_an_answer_that_breaks_off_names_the_server() -> None:
    client = server([], chunk("Hel"), "[DONE]")()
    with pytest.raises(ConnectionLostError, match="was cut off: the server at gpu:8000 stopped before the end"):
        await text_of(client, model="big-70b")
    await client.aclose()


async def test_nobody_there() -> None:
    port = bind("127.0.0.1", 0)
    address = f"127.0.0.1:{port.getsockname()[1]}"
    port.close()
    supervisor = RemoteSupervisor(f"http://{address}", "")
    with pytest.raises(ConnectionLostError, match=f"the server at {address} can't be reached"):
        await supervisor.ensure()
    with pytest.raises(ClientError, match="enter http"):
        await RemoteSupervisor("gpu:8000", "").ensure()


@pytest.mark.parametrize(
    ("url", "problem"),
    [("http://h", None), ("https://h:1/v1", None), ("ftp://h", "enter http"), ("http://u:p@h", "password"),
     ("http://h:x", "not an address"), ("http://h/v1?key=p", "query")],
)  # fmt: skip
def test_addresses(url: str, problem: str | None) -> None:
    found = endpoint_problem(url, "")
    assert found is None if problem is None else problem in (found or "")
    assert url not in (found or "")  # it may hold a secret


@pytest.mark.parametrize("url", ["https://gpu/v1", "http://localhost:8000", "http://127.0.0.1/v1", "http://[::1]:1"])
def test_a_token_may_travel_where_nobody_reads_it(url: str) -> None:
    assert endpoint_problem(url, "secret") is None


@pytest.mark.parametrize("token", ["s3cret\nx", "s3cr\xe9t", " s3cret", "s3cret\0"])
def test_a_token_that_no_header_carries_is_told_without_it(token: str) -> None:
    assert endpoint_problem("https://gpu/v1", token) == "the token may contain only visible ASCII characters"


@pytest.mark.parametrize(
    "url", ["http://gpu:8000/v1", "HTTP://192.0.2.1", "http://localhost.gpu", "http://[2001:db8::1]"]
)
async def test_a_token_is_not_sent_unencrypted(url: str) -> None:
    with pytest.raises(ClientError, match="unencrypted; use https://, a tunnel from localhost, or no token"):
        await RemoteSupervisor(url, "secret").ensure()


async def test_it_does_not_follow_to_another_address() -> None:
    asked: list[httpx.Request] = []

    def elsewhere(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(307, headers={"location": f"https://user:word@evil:1{request.url.path}"})

    client = RemoteClient("https://gpu/v1", "secret", transport=httpx.MockTransport(elsewhere))
    said = "the server at gpu redirects to https://evil:1, which is not followed"
    with pytest.raises(ClientError, match=said):
        await client.status()
    with pytest.raises(ClientError, match=said):
        await text_of(client, model="big-70b")
    assert {request.url.host for request in asked} == {"gpu"}
    await client.aclose()


async def test_our_own_server_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a management token, as `serve` runs: what the UI needs of it is OpenAI's protocol alone.

    On this machine it is reached without a proxy, which would read the token.
    """
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
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


@contextlib.asynccontextmanager
async def foreign(answer: Iterator[bytes], pause_s: float = 0.0) -> AsyncIterator[RemoteClient]:
    """A client of a server that answers every request with these bytes, as far as they are read."""

    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for part in answer:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = RemoteClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
    client.silence_s = client.patience_s = 0.5
    try:
        yield client
    finally:
        await client.aclose()
        await served.wait()
        server.close()
        await server.wait_closed()


OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = f"data: {json.dumps(chunk('x' * 50_000))}\n\n".encode()
MUCH = 64 * 16  # times 64 KiB: what would be endless ends there, lest a test that fails fill the memory


def endless(head: bytes, part: bytes, times: int = MUCH) -> Iterator[bytes]:
    yield head
    for _ in range(times):
        yield part


def event(**delta: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()


CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
STREAMS: dict[str, tuple[Callable[[], Iterator[bytes]], str]] = {
    "a line": (lambda: endless(OK + b"data: ", b"x" * 65536), "a line of more than 1,048,576 bytes"),
    "no line": (lambda: endless(OK, b"x" * 65536), "a line of more than 1,048,576 bytes"),
    "comments": (lambda: endless(OK, b": ping\n\n", 300), "keep-alives but no answer"),
    "names": (lambda: endless(OK, b"event: ping\n", 300), "keep-alives but no answer"),
    "text": (lambda: endless(OK, EVENT), "sent an endless answer: more than 1,000,000 characters"),
    "calls": (lambda: endless(OK, event(tool_calls=[CALL])), "calls more than 64 tools in one answer"),
    "calls at once": (lambda: iter([OK, event(tool_calls=[CALL] * 9000)]), "calls more than 64 tools in one answer"),
    "pieces of a call": (lambda: endless(OK, event(tool_calls=[{"index": 0, "function": {}}]) * 99, 200), "endless"),
    "empty events": (lambda: endless(OK, event(content="") * 99), "sends events but no answer"),
    "events without choices": (lambda: endless(OK, b'data: {"choices": []}\n\n' * 99), "sends events but no answer"),
    "slow empty events": (lambda: endless(OK, event(role="assistant"), 300), "sends events but no answer"),
    "bytes": (lambda: endless(OK, b": " + b"x" * 65536 + b"\n"), "a stream of more than 2,097,152 bytes"),
    "a header": (lambda: endless(b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536), "can't be reached"),
    "promises": (lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 300), "does not respond"),
    "an error": (lambda: endless(b"HTTP/1.1 500 No\r\n\r\n", b"z" * 65536), "status 500"),
    "packed": (
        lambda: endless(OK[:-2] + b"content-encoding: gzip\r\n\r\n", gzip.compress(b"data: " + bytes(10**7)), 9),
        "compresses its responses",
    ),
    "nesting": (lambda: iter([OK, b"data: " + b"[" * 100_000 + b"\n\n"]), "more than 200 deep"),
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_stream_without_end_is_one_error_and_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("app.client.MAX_BYTES", 2**20)
    monkeypatch.setattr("app.client.MAX_TEXT", 10_000 if "pieces" in kind else 10**6)
    monkeypatch.setattr("app.protocol.MAX_IDLE", 5000)
    if kind == "bytes":
        monkeypatch.setattr("app.protocol.MAX_STREAM", 2**21)
    answer, said = STREAMS[kind]
    slow = kind in ("comments", "names", "promises", "slow empty events")
    async with foreign(answer(), 0.01 if slow else 0) as client:
        client.patience_s = 30.0 if kind == "bytes" else client.patience_s
        tracemalloc.start()
        try:
            with pytest.raises(ClientError, match=said) as failure:
                async with asyncio.timeout(60):
                    await text_of(client, model="m")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert len(str(failure.value)) < 300
    assert peak < 12e6, f"{peak / 1e6:.0f} MB"


async def test_a_short_answer_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.client.MAX_BYTES", 2**20)
    async with foreign(endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536)) as client:
        with pytest.raises(ClientError, match="exceeds 1,048,576 bytes"):
            await client.status()


async def test_nothing_is_kept_for_a_server() -> None:
    reply = b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 12\r\n\r\n" + b'{"data": []}'
    async with foreign(iter([reply])) as client:
        await client.status()
        assert not client._http.cookies


@pytest.mark.parametrize(
    "more",
    [
        {"timings": 3},
        {"timings": {"ttft_s": "x"}},
        {"timings": {"ttft_s": float("nan")}, "usage": "x"},
        {"timings": dict.fromkeys(Timings.__dataclass_fields__, -1)},
        {"timings": dict.fromkeys(Timings.__dataclass_fields__, 10**30)},
        {"timings": dict.fromkeys(Timings.__dataclass_fields__, float("inf"))},
        {"tokens_per_s": "x", "usage": {"completion_tokens": -1e300}, "model": 5, "id": []},
        {"error_": None, "model": "y" * 10_000},
    ],
    ids=lambda more: str(more)[:40],
)
async def test_what_a_server_tells_beside_its_answer_does_not_spoil_it(more: dict[str, Any]) -> None:
    client = server([], {**chunk("he"), "choices": [{"delta": None}]}, chunk("hello", "stop", **more))()
    deltas = [delta async for delta in client.chat(HELLO, ChatOptions(model="m"))]
    assert "".join(delta.text for delta in deltas) == "hello"
    assert deltas[-1].timings is None
    assert len(deltas[-1].model or "") <= 300


async def test_half_characters_and_odd_line_ends_in_an_answer() -> None:
    told = ['{"choices": [{"delta": {"content": "a\\ud83d \u2028b"}, "finish_reason": "stop"}]}\r']
    assert await text_of(server([], *told)(), model="m") == "a\ufffd \u2028b"


@pytest.mark.parametrize("length", [True, -5, 0, 10**30, 1e300, "many", None, [8]])
async def test_a_context_that_is_none_is_unknown(length: Any) -> None:
    odd = [{"id": name} for name in ([1], "", None, {}, "x" * 301)]
    listed = {"data": [*odd, {"id": "small \ud83d", "max_model_len": length}]}
    client = server([], models=listed)()
    assert [(model.name, model.context) for model in await client.models()] == [("small \ufffd", 0)]
    assert (await client.status()).context is None


async def test_what_a_server_says_is_not_told_at_any_length() -> None:
    told = {"error": {"message": "m" * 10**6, "code": "c" * 10**6, "param": "p" * 10**6}}
    transport = httpx.MockTransport(lambda _: httpx.Response(400, json=told))
    with pytest.raises(RequestRefusedError) as failure:
        await text_of(RemoteClient("http://gpu:8000", "", transport=transport), model="m")
    assert max(map(len, (str(failure.value), failure.value.code or "", failure.value.param or ""))) <= 1000


async def test_a_process_that_was_stopped_did_not_wait_in_vain() -> None:
    """As by Ctrl+Z: when it goes on, everything that it waited for is late, and there."""

    def answer() -> Iterator[bytes]:
        yield OK
        for word in ("one ", "two"):
            yield f"data: {json.dumps(chunk(word))}\n\n".encode()
        yield b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'

    async with foreign(answer(), 0.1) as client:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 1.0)
        assert await text_of(client, model="m") == "one two"
