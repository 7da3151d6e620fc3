from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import make_service

from runtime.errors import RequestError
from runtime.server.errors import ApiError
from runtime.server.serve import base_url, run
from runtime.wire.requests import LoadRequest

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_engine import make_service
from runtime.wire.requests import LoadRequest
from runtime.server.serve import run
service, house = make_service()
tell = lambda text: print(text, flush=True)
model = LoadRequest(model=sys.argv[2])
sys.exit(run(service, port=0, token="secret", model=model, progress=lambda p: tell(p.message), ready=tell))
"""
FOLDER = str(Path(__file__).parent)


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def run_server(model: str) -> subprocess.Popen[str]:
        children.append(
            subprocess.Popen([sys.executable, "-c", SERVER, FOLDER, model], stdout=subprocess.PIPE, text=True)
        )
        return children[-1]

    yield run_server
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_it_serves_until_a_signal(
    start: Callable[[str], subprocess.Popen[str]], number: signal.Signals, code: int
) -> None:
    child = start("small")
    assert child.stdout is not None
    lines = [child.stdout.readline().strip() for _ in range(5)]
    assert lines[:4] == ["loading small", "block 0", "block 1", "block 2"]
    with openai.OpenAI(base_url=lines[4], api_key="secret", max_retries=0) as client:
        messages = [{"role": "user", "content": "echo hi"}]
        answer = client.chat.completions.create(model="small", messages=messages)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "hi"
        for path in ("/runtime/status", "/runtime/pull", "/runtime/remove"):
            response = httpx.post(
                lines[4].removesuffix("/v1") + path, json={}, headers={"Authorization": "Bearer secret"}
            )
            assert response.status_code == 404
    child.send_signal(number)
    assert child.wait(30) == code


def test_a_signal_while_the_model_loads(start: Callable[[str], subprocess.Popen[str]]) -> None:
    child = start("slow-to-load")
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130


def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    service, house = make_service()
    with pytest.raises(ApiError, match="quantize the model again"):
        run(service, port=0, model=LoadRequest(model="broken"))
    assert service.close(0.5)
    assert all(engine.closed for engine in house.engines)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"host": "0.0.0.0", "port": 0}, "needs a token"),
        *(
            ({"host": host, "port": port, "token": "secret"}, "cannot listen")
            for host, port in (("203.0.113.7", 0), ("127.0.0.1", 70000), ("no such name", 0), ("127.0.0.1", -1))
        ),
    ],
)
def test_addresses_that_it_cannot_or_may_not_bind(asked: dict[str, Any], said: str) -> None:
    service, _ = make_service()
    with pytest.raises(RequestError, match=said):
        run(service, **asked)
    assert service.close(0.5)


def test_a_port_that_is_taken() -> None:
    service, _ = make_service()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match="in use"):
            run(service, port=taken.getsockname()[1])
    assert service.close(0.5)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (("127.0.0.1", 80), "http://127.0.0.1:80/v1"),
        (("0.0.0.0", 80), "http://127.0.0.1:80/v1"),
        (("::", 80, 0, 0), "http://[::1]:80/v1"),
    ],
)
def test_the_url_that_is_told(name: tuple[object, ...], url: str) -> None:
    class Bound:
        def getsockname(self) -> tuple[object, ...]:
            return name

    assert base_url(Bound()) == url  # type: ignore[arg-type]
