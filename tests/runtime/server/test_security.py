from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from runtime.errors import RequestError
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import Service
from runtime.system.hosts import is_loopback

PATHS = ["/v1/models", "/runtime/status", "/nothing"]


def client_of(service: Service, security: Security) -> httpx.AsyncClient:
    app = create_app(service, security)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080")


@pytest.fixture
async def open_client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service, Security()) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "127.0.0.1", "localhost", "LOCALHOST:1", "localhost.", "[::1]:8080", "[0:0:0:0:0:0:0:1]"],
)
async def test_own_names_are_accepted(open_client: httpx.AsyncClient, host: str) -> None:
    assert (await open_client.get("/v1/models", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "127.0.0.1.evil.example:8080",
        "localtest.me",
        "0.0.0.0:8080",
        "127.1",
        "2130706433",
        "192.168.1.5",
        "[::ffff:127.0.0.1]",
        "localhost:80:80",
        "localhost:http",
        "user@localhost",
        "localhost evil",
        "localhost/",
        "",
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_rebound_and_foreign_names_are_refused(open_client: httpx.AsyncClient, host: str, path: str) -> None:
    response = await open_client.get(path, headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


async def call(service: Service, security: Security, headers: list[tuple[bytes, bytes]]) -> int:
    """Status of a request with exactly these headers."""
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8080),
        "client": ("127.0.0.1", 5000),
        "headers": headers,
    }
    await create_app(service, security)(scope, receive, send)  # type: ignore[arg-type]
    return statuses[0]


HOST = (b"host", b"localhost")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 403),
        ([HOST], 200),
        ([HOST, HOST], 403),
        ([HOST, (b"host", b"evil.example")], 403),
        ([(b"host", b"local\xffhost")], 403),
    ],
    ids=["none", "one", "twice", "two", "bytes"],
)
async def test_exactly_one_host(service: Service, headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert await call(service, Security(), headers) == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [([b"Bearer abc"], 200), ([b"Bearer abc", b"Bearer abc"], 401), ([b"Bearer abc", b"Bearer x"], 401)],
)
async def test_exactly_one_token(service: Service, authorization: list[bytes], status: int) -> None:
    headers = [HOST, *((b"authorization", value) for value in authorization)]
    assert await call(service, Security(token="abc"), headers) == status


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8080", "HTTP://127.0.0.1:8080"])
async def test_the_own_origin_is_accepted(open_client: httpx.AsyncClient, origin: str) -> None:
    assert (await open_client.get("/v1/models", headers={"Origin": origin})).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8080",
        "http://127.0.0.1:3000",
        "http://localhost:8080",
        "http://127.0.0.1:8080.evil.example",
        "http://127.0.0.1:8080@evil.example",
        "null",
        "",
        "file://",
        "chrome-extension://abc",
        "http://[",
    ],
)
async def test_other_origins_are_refused(open_client: httpx.AsyncClient, origin: str) -> None:
    response = await open_client.post("/v1/chat/completions", headers={"Origin": origin}, json={})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer", "Bearer ", "Bearer wrong", "Bearer secre", "Bearer secrett", "Basic secret", "secret", "Bearer ü"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/nothing"])
async def test_a_wrong_token_is_refused(service: Service, authorization: str | None, path: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    async with client_of(service, Security(token="secret")) as client:
        response = await client.get(path, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "secret" not in response.text


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer secret", "Bearer  secret"])
async def test_the_right_token_is_accepted(service: Service, authorization: str) -> None:
    async with client_of(service, Security(token="secret")) as client:
        assert (await client.get("/v1/models", headers={"Authorization": authorization})).status_code == 200


async def test_management_needs_its_own_token_always(service: Service) -> None:
    async with client_of(service, Security(token="public", management_token="managing")) as client:
        for token, status in (("public", 401), ("managing", 200)):
            response = await client.get("/runtime/status", headers={"Authorization": f"Bearer {token}"})
            assert response.status_code == status
        assert (await client.get("/runtime/status")).status_code == 401
        for path in ("/runtime", "/runtime/nothing"):
            assert (await client.get(path)).status_code == 401
    async with client_of(service, Security(management_token="managing")) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/runtime/status")).status_code == 401


@pytest.mark.parametrize("verb", ["load", "quantize", "pull", "remove", "unload", "shutdown"])
async def test_without_a_management_token_there_is_no_management(service: Service, verb: str) -> None:
    async with client_of(service, Security(token="public")) as client:
        response = await client.post(f"/runtime/{verb}", json={}, headers={"Authorization": "Bearer public"})
    assert response.status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [("//runtime/status", 404), ("/v1/../runtime/status", 401), ("/Runtime/status", 404), ("/%72untime/status", 401)],
)
async def test_no_spelling_of_a_path_leads_around_the_token(service: Service, path: str, status: int) -> None:
    async with client_of(service, Security(management_token="managing")) as client:
        assert (await client.get(f"http://127.0.0.1:8080{path}")).status_code == status


async def test_a_large_body_is_refused_while_it_comes(service: Service) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"x" * 50

    async with client_of(service, Security(max_body_bytes=100)) as client:
        response = await client.post("/v1/chat/completions", content=body())
    assert response.status_code == 413
    assert sent < 10


async def test_a_large_body_is_refused_by_its_header_and_one_of_just_the_limit_is_read(service: Service) -> None:
    async with client_of(service, Security(max_body_bytes=100)) as client:
        response = await client.post("/v1/chat/completions", content=b"x" * 101)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        response = await client.post("/v1/chat/completions", content=b"{}", headers={"Content-Length": "9" * 30})
        assert response.status_code == 413
        response = await client.post("/v1/chat/completions", content=b" " * 98 + b"{}")
        assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "[::1]", "LOCALHOST"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    security = Security.for_bind(host, None)
    assert security.token is None
    assert not security.any_address


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.1.5", "10.0.0.1", "my-machine", "8.8.8.8", "localhost.x", "::1%x"]
)
def test_beyond_loopback_a_token_is_needed(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(RequestError, match="needs a token"):
        Security.for_bind(host, None)
    assert Security.for_bind(host, "secret").token == "secret"


@pytest.mark.parametrize("token", ["", " ", "a b", "ü", "a\n", "x" * 513])
def test_tokens_that_a_header_cannot_carry(token: str) -> None:
    with pytest.raises(RequestError, match="token"):
        Security.for_bind("0.0.0.0", token)
    with pytest.raises(RequestError, match="token"):
        Security.for_bind("127.0.0.1", token)


def test_hosts_of_a_server_for_other_machines() -> None:
    security = Security.for_bind("0.0.0.0", "secret", extra_hosts=["Chat.Example.Org"])
    accepted = ["192.168.1.5:8080", "localhost", "chat.example.org", "[fe80::1]:80", "8.8.8.8"]
    refused = ["evil.example", "0.0.0.0", "[::]", "example.org", "192.168.1.5.nip.io"]
    assert [host for host in accepted if not security.accepts_host(host)] == []
    assert [host for host in refused if security.accepts_host(host)] == []


def test_no_token_shows() -> None:
    assert "secret" not in repr(Security(token="secret", management_token="secret2"))
