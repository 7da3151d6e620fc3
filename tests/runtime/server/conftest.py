"""A service with a fake model, and HTTP clients for it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeHouse, make_service

from runtime.server.security import Security
from runtime.server.serve import bind, create_app, listen
from runtime.server.service import Service


def wait_until(predicate: Callable[[], object]) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.005)


BASE = "http://127.0.0.1:8080"
MANAGEMENT = "management-token"


@pytest.fixture
def house() -> FakeHouse:
    return FakeHouse()


@pytest.fixture
def service(house: FakeHouse) -> Iterator[Service]:
    service, _ = make_service(house)
    yield service
    assert service.close(), "the engine's thread must end"


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Asks an application without a public token in this very process."""
    app = create_app(service, Security(management_token=MANAGEMENT))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
        yield client


@pytest.fixture
async def manager(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Like `client`, with the management token."""
    app = create_app(service, Security(token=MANAGEMENT, management_token=MANAGEMENT))
    headers = {"Authorization": f"Bearer {MANAGEMENT}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers) as client:
        yield client


class Listening:
    """A real server on loopback, in a thread of its own."""

    def __init__(self, service: Service, security: Security) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(service, security))
        self._thread.start()
        assert self._started.wait(20)

    def _run(self, service: Service, security: Security) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(listen(service, security, self._listener, self._stop, self._started.set))

    def close_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        if self._thread.is_alive():
            self.close_soon()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(service: Service) -> Iterator[Callable[..., Listening]]:
    """Starts a real server of the service; keyword arguments go to Security."""
    running: list[Listening] = []

    def start(**security: Any) -> Listening:
        running.append(Listening(service, Security(**security)))
        return running[-1]

    yield start
    for server in running:
        server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A real server, what it serves, and the official client."""

    server: Listening
    house: FakeHouse
    client: openai.OpenAI


@contextmanager
def standing() -> Iterator[Standing]:
    """Context manager: a server with a house of its own."""
    service, house = make_service()
    server = Listening(service, Security())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield Standing(server=server, house=house, client=client)
    server.close()
    assert service.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Standing]:
    """A server for all tests of a file that leave it as it was: to end one takes 0.2 s."""
    with standing() as found:
        yield found
