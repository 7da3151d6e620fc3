"""Hostile requests that try to break the server or to gain access."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.runtime.server.conftest import Standing

CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": "echo hi"}], **more}


def deep(levels: int) -> bytes:
    return b'{"model": "small", "messages": ' + b"[" * levels + b"]" * levels + b"}"


def answered_in(schema: dict[str, Any]) -> bytes:
    """A request for an answer in a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return json.dumps(body(response_format=form)).encode()


def deep_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


DEEP_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * 100_000}}
CHAIN = {"$ref": "#/r0", **{f"r{i}": {"items": {"$ref": f"#/r{i + 1}"}} for i in range(3000)}, "r3000": {}}

BODIES: dict[str, bytes] = {
    "NaN": json.dumps(body(temperature=float("nan"))).encode(),
    "infinity": json.dumps(body(top_p=float("inf"))).encode(),
    "a huge number": b'{"model": "small", "temperature": 1e999, "messages": []}',
    "a huge seed": json.dumps(body(seed=10**400)).encode(),
    "10,000 stops": json.dumps(body(stop=["x"] * 10_000)).encode(),
    "a million messages": json.dumps(body(messages=[{"role": "user", "content": ""}] * 100_000)).encode(),
    "deep": deep(10_000),
    "very deep": deep(1_000_000),
    "broken UTF-8": b'{"model": "small", "messages": [{"role": "user", "content": "\xff\xfe\xc3"}]}',
    "a lone surrogate": b'{"model": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "zeros": b"\0" * 1000,
    "half a body": b'{"model": "small", "messages": [{"ro',
    "nothing": b"",
    "a path for a name": json.dumps(body(model="../../../etc/passwd")).encode(),
    "a name with zeros": json.dumps(body(model="small\0")).encode(),
    "a long name": json.dumps(body(model="x" * 100_000)).encode(),
    "an evil pattern": json.dumps(body(structured_outputs={"regex": "(a{1,1000}){1,1000}"})).encode(),
    "a schema that refers to itself": answered_in({"$ref": "#"}),
    "a schema from elsewhere": answered_in({"$ref": "file:///etc/passwd"}),
    "a deep call": json.dumps(body(messages=[{"role": "assistant", "tool_calls": [DEEP_CALL]}])).encode(),
    "a chain of references": json.dumps(body(structured_outputs={"json": CHAIN})).encode(),
    "16 MB of nothing": b'{"model": "small", "messages": [' + b"[]," * 5_000_000 + b"[]]}",
    "a deep schema": answered_in(deep_schema()),
}


OTHERS = ("/v1/responses", "/v1/completions", "/v1/embeddings", "/v1/messages", "/api/chat")


@pytest.mark.parametrize(
    ("kind", "path"),
    [*((kind, CHAT) for kind in BODIES), *((kind, OTHERS[at % len(OTHERS)]) for at, kind in enumerate(BODIES))],
)
async def test_bodies(client: httpx.AsyncClient, kind: str, path: str) -> None:
    began = time.monotonic()
    response = await client.post(path, content=BODIES[kind], headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert 0 < len(message) < 2000
        assert "Traceback" not in response.text
        assert "/site-packages/" not in response.text
        assert "root:" not in response.text
    assert time.monotonic() - began < 60
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/models/..%5c..%5cwindows",
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1/models/" + "x" * 8000,
        "//v1/models",
        "/v1/models/small/",
        "/v1/models/%f0%9f%98%80",
    ],
)
async def test_paths(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert "root:" not in response.text


@pytest.mark.parametrize("verb", ["PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "GET"])
async def test_verbs(client: httpx.AsyncClient, verb: str) -> None:
    response = await client.request(verb, CHAT)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


def test_a_client_that_is_slow_stops_nobody(shared: Standing) -> None:
    server = shared.server
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    for each in slow:
        each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    answers = [httpx.post(f"{server.url}{CHAT}", json=body(), timeout=30) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    for each in slow:
        each.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a header": HEAD + b"Content-Le",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "a body that is refused": HEAD.replace(b"127.0.0.1", b"evil") + b"Content-Length: 100\r\n\r\n{",
    "half of a second request": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea",
}


def test_connections_that_wait_make_room(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever fewer than the descriptors that the process may open."""
    monkeypatch.setattr("runtime.server.serve.most_files", lambda: 16)
    server = serve()
    for kind, sent in UNFINISHED.items():
        waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(40)]
        for each in waiting:
            with contextlib.suppress(ConnectionError):  # it may have been closed already
                each.sendall(sent)
        assert httpx.post(f"{server.url}{CHAT}", json=body(), timeout=30).status_code == 200, kind
        assert sum(ended(each) for each in waiting[:32]) == 32, kind
        for each in waiting:
            each.close()


def ended(connection: socket.socket) -> bool:
    """Whether the server closes a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def test_a_request_arrives_in_time(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not help."""
    monkeypatch.setattr("runtime.server.serve.ARRIVAL_S", 0.2)
    server = serve()
    open_ = {kind: socket.create_connection(("127.0.0.1", server.port), timeout=30) for kind in UNFINISHED}
    for kind, connection in open_.items():
        connection.sendall(UNFINISHED[kind])
        connection.settimeout(0.01)
    for _ in range(600):
        for kind, connection in list(open_.items()):
            with contextlib.suppress(TimeoutError):
                if closed(connection):
                    open_.pop(kind).close()
        time.sleep(0.02)
        if not open_:
            return
    pytest.fail(f"still open: {[*open_]}")


def closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection, which is sent another byte if not."""
    try:
        if not connection.recv(65536):
            return True
        connection.sendall(b"x")
    except TimeoutError:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_what_arrives_steadily_is_awaited_and_answered_at_length(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.server.serve.ARRIVAL_S", 0.1)
    monkeypatch.setattr("runtime.server.serve.SLOWEST", 1)
    server = serve()
    asked = json.dumps(body(messages=[{"role": "user", "content": "slow 50"}], stream=True)).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(HEAD + f"Content-Length: {len(asked)}\r\nConnection: close\r\n\r\n".encode() + asked[:50])
        time.sleep(0.2)
        monkeypatch.setattr("runtime.server.serve.SLOWEST", 2**20)
        connection.sendall(asked[50:])
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer


def test_an_error_that_repeats_is_logged_once(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when no descriptor is left for another connection: asyncio says so thousands of times a second."""
    errors, accept = iter([OSError(errno.EMFILE, "Too many open files")] * 300), socket.socket.accept

    def failing(listener: socket.socket) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return accept(listener)

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    monkeypatch.setattr(socket.socket, "accept", failing)
    assert httpx.get(f"{serve().url}/health", timeout=30).status_code == 200
    assert [record.levelname for record in caplog.records if record.name == "asyncio"] == ["ERROR"]
    assert "Traceback" not in caplog.text


def whole(**more: Any) -> bytes:
    """A request of a stream."""
    asked = json.dumps(body(stream=True, **more)).encode()
    return HEAD + f"Content-Length: {len(asked)}\r\n\r\n".encode() + asked


def test_a_reader_that_stops_reading_stops_nobody(shared: Standing) -> None:
    server = shared.server
    lazy = socket.create_connection(("127.0.0.1", server.port))
    lazy.sendall(whole())
    assert httpx.post(f"{server.url}{CHAT}", json=body(), timeout=30).status_code == 200
    lazy.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=["TLS", "no host", "two hosts", "negative length", "bad chunks", "long path", "long header"],
)
def test_what_is_hardly_http(shared: Standing, sent: bytes) -> None:
    server = shared.server
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:  # it hung up while we were sending; if so, shutdown says "not connected"
            pass
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(65536)
    assert not answer or answer.split()[1] in (b"400", b"403", b"404", b"431")
    assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200


def test_many_that_hang_up(shared: Standing) -> None:
    server = shared.server

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(whole(messages=[{"role": "user", "content": "slow 100"}]))

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer = httpx.post(f"{server.url}{CHAT}", json=body(), timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "hi"
