"""Listening: a bound socket, the web server on it, and a clean shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from runtime.errors import RequestError
from runtime.server.app import create_app
from runtime.server.security import Security
from runtime.server.service.service import Service

GRACE_S = 3
"""Seconds that running requests get to finish at shutdown."""
UNLOAD_S = 5.0
"""Seconds that the engine's thread then gets to finish."""


class _Uvicorn(uvicorn.Server):
    """uvicorn with a callback on startup, and without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call back."""
        await super().startup(sockets)
        self._on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not install signal handlers."""
        yield


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
        listener.listen(128)
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
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Uvicorn(config, started)
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
