"""The web server: the ASGI application, a socket with limits on connections, and a clean shutdown.

`run` is the public server (`lowbit-chat serve`): no management interface, optional token. The UI's own is
`runtime.server.process`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from models.errors import ModelError
from models.progress import ProgressCallback, ignore_progress
from runtime.errors import RequestError, RuntimeFailure
from runtime.server.anthropic.interface import AnthropicInterface
from runtime.server.bodies import Disconnected, Reader, error_answer, json_answer
from runtime.server.errors import ApiError, api_error
from runtime.server.management import ManagementInterface
from runtime.server.ollama.interface import OllamaInterface
from runtime.server.openai.public import PublicInterface
from runtime.server.openapi import document
from runtime.server.security import Guard, Security
from runtime.server.service import Service
from runtime.system.child_process import most_files
from runtime.wire.requests import LoadRequest

PING_S = 5.0
"""Seconds between keep-alive comments in an idle stream."""
GRACE_S = 3
"""Seconds that running requests get to finish at shutdown."""
UNLOAD_S = 5.0
"""Seconds that the engine's thread then gets to finish."""
ARRIVAL_S = 30.0
"""Seconds within which a request must arrive, header and body."""
SLOWEST = 2**13
"""Bytes of a request that give it another second."""
MOST_CONNECTIONS = 512
"""Most connections, or fewer: half of what the process may open."""
QUEUE = 1024
"""Connections that wait in the system to be accepted."""
REPEAT_S = 60.0
"""Seconds in which an error that repeats is logged once."""
_LOGGERS = ("asyncio", "uvicorn.error", "runtime.server.errors")
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def create_app(
    service: Service, security: Security, *, ping_s: float = PING_S, shutdown: Callable[[], None] = lambda: None
) -> ASGIApp:
    """Create the application.

    Args:
        service: The service behind the routes.
        security: The security policy. Without a management token there is no `/runtime/*`.
        ping_s: Seconds between comments in an idle stream.
        shutdown: Stops the server, for `POST /runtime/shutdown`.
    """
    reader = Reader()
    routes = PublicInterface(service, ping_s, reader).routes()
    routes += AnthropicInterface(service, ping_s, reader).routes()
    routes += OllamaInterface(service, reader).routes()
    routes.append(Route("/openapi.json", _document, methods=["GET"]))
    if security.management_token is not None:
        routes += ManagementInterface(service, ping_s, reader, shutdown).routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _http_error,
            RuntimeFailure: _failure,
            ModelError: _failure,
            MemoryError: _failure,
            Disconnected: _nobody_listens,
            ClientDisconnect: _nobody_listens,
            Exception: _failure,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, security)


async def _document(_request: Request) -> Response:
    return json_answer(document())


async def _failure(request: Request, error: Exception) -> Response:
    return error_answer(api_error(error), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = ApiError(error.status_code, message, code=code, headers=error.headers)
    return error_answer(answer, request.url.path)


async def _nobody_listens(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


class _Uvicorn(uvicorn.Server):
    """uvicorn with a callback on startup, and without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not install signal handlers."""
        yield


class _Connection(H11Protocol):
    """A connection that is closed when a request does not arrive in time, or when others need its place.

    Only a connection that waits for its client is closed. An answer takes as long as it takes.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for a request, and if there are too many connections, close the one that has waited longest."""
        super().connection_made(transport)
        self._wait()
        assert self.limit_concurrency is not None, "listen sets it"
        if len(self.connections) < self.limit_concurrency:
            return
        others = [one for one in self.connections if isinstance(one, _Connection) and one.waits and one is not self]
        if others:
            min(others, key=lambda one: one.since).drop()

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn to send."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.flow.read_paused

    def drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self.since, self._received = self.loop.time(), 0
        self._check()

    def _check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self.since + ARRIVAL_S + self._received / SLOWEST - self.loop.time()
        if left > 0 or self.flow.read_paused:
            self._timer = self.loop.call_later(left if left > 0 else 1, self._check)
        elif self.waits:
            self.drop()


class _Rarely(logging.Filter):
    """Lets each kind of message through once in `REPEAT_S`, since a client may cause it a thousand times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        message, now = f"{record.getMessage()} {record.exc_info and record.exc_info[0]}", time.monotonic()
        if now - self._logged.get(message, -REPEAT_S) < REPEAT_S:
            return False
        if len(self._logged) > MOST_CONNECTIONS:
            self._logged.clear()
        self._logged[message] = now
        return True


@contextmanager
def _few_lines_logged() -> Iterator[None]:
    """Context manager: errors that repeat are logged rarely, and those of the event loop in one line."""
    rarely, loop = _Rarely(), asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(_log)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(rarely)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(rarely)


def _log(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logging.getLogger("asyncio").error("%s: %r", context["message"], context.get("exception"))


def bind(host: str, port: int) -> socket.socket:
    """Create a listening socket.

    Args:
        host: Address or name.
        port: TCP port; 0 chooses a free one.

    Raises:
        RequestError: the address is not one of this machine, or the port is taken.
    """
    if not 0 <= port <= 65535:  # the system would truncate it to 16 bits
        raise RequestError(f"cannot listen on port {port}: choose one from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"cannot listen on {host}: {error}") from error
    try:
        if sys.platform != "win32":  # on Windows, the option would let two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(QUEUE)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise RequestError(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another") from error
    return listener


async def listen(
    service: Service,
    security: Security,
    listener: socket.socket,
    stop: asyncio.Event,
    started: Callable[[], object],
) -> bool:
    """Serve until `stop` is set, then end running requests, unload the model, and close the socket.

    Args:
        service: The service; closed at the end.
        security: The security policy.
        listener: A listening socket; closed at the end.
        stop: Stops the server. `POST /runtime/shutdown` sets it too.
        started: Called once requests are answered.

    Returns:
        Whether the engine's thread ended in time; if not, only the end of the process stops it.
    """
    app = create_app(service, security, shutdown=stop.set)
    most = min(MOST_CONNECTIONS, (most_files() or 2 * MOST_CONNECTIONS) // 2)

    def ready() -> None:
        listener.listen(QUEUE)  # uvicorn has set the backlog's
        started()

    config = uvicorn.Config(
        app,
        http=_Connection,
        limit_concurrency=most + 1,
        backlog=max(1, most // 8),  # so many are accepted before the first of them is counted
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Uvicorn(config, ready)
    with _few_lines_logged():
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.cancel_all()
            server.should_exit = True
            stopping.cancel()
            await asyncio.wait([serving])
            listener.close()
            ended = await asyncio.to_thread(service.close, UNLOAD_S)
    serving.result()
    return ended


@contextmanager
def stopped_by_signals(stop: Callable[[int], object]) -> Iterator[None]:
    """Context manager: SIGINT, SIGTERM and SIGHUP call `stop` with their number, in the running event loop.

    Does nothing outside the main thread, which receives no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":
        before = signal.signal(signal.SIGINT, lambda number, _frame: loop.call_soon_threadsafe(stop, number))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)  # unlike signal.signal, works whichever thread is interrupted
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def run(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    model: LoadRequest | None = None,
    allowed_hosts: Sequence[str] = (),
    progress: ProgressCallback = ignore_progress,
    ready: Callable[[str], object] = lambda _url: None,
) -> int:
    """Serve `/v1/*` and `/api/*` until Ctrl-C or SIGTERM. There is no `/runtime/*`: models cannot be deleted or tuned.

    Args:
        service: The service, from `runtime.server.service.open_service`; closed at the end.
        host: Address to listen on. Addresses beyond loopback require a token.
        port: TCP port; 0 chooses a free one.
        token: Bearer token required by requests; None: not required.
        model: Model to load at the start, after binding the socket and before answering requests. Other models of the
            catalogue are loaded when a request names them.
        allowed_hosts: Additional names allowed in the `Host` header, for example behind a proxy.
        progress: Receives progress reports while the model loads.
        ready: Called with the base URL, `http://127.0.0.1:8080/v1`, once the server is ready.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        RequestError: the address is not loopback and there is no token; the token, address or port is invalid.
        ApiError: the model cannot be loaded.
    """
    try:
        security = Security.for_bind(host, token, extra_hosts=allowed_hosts)
        listener = bind(host, port)
    except BaseException:
        service.close()
        raise
    return asyncio.run(_serve(service, security, listener, model, progress, ready))


async def _serve(
    service: Service,
    security: Security,
    listener: socket.socket,
    model: LoadRequest | None,
    progress: ProgressCallback,
    ready: Callable[[str], object],
) -> int:
    stop = asyncio.Event()
    numbers: list[int] = []

    def stopped(number: int) -> None:
        numbers.append(number)
        service.cancel_all()
        stop.set()

    with stopped_by_signals(stopped):
        try:
            if model is not None:
                async with aclosing(service.load(model)) as reports:
                    async for report in reports:
                        progress(report)
        except BaseException:
            listener.close()
            await asyncio.to_thread(service.close)
            if stop.is_set():
                return _code(numbers)
            raise
        await listen(service, security, listener, stop, lambda: ready(base_url(listener)))
    return _code(numbers)


def base_url(listener: socket.socket) -> str:
    """URL of the OpenAI interface of a listening socket, from this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared, not bound
    return f"http://[{shown}]:{port}/v1" if ":" in shown else f"http://{shown}:{port}/v1"


def _code(numbers: Sequence[int]) -> int:
    return INTERRUPTED if signal.SIGINT in numbers else 0
