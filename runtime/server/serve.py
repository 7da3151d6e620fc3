"""The public server (`lowbit-chat serve`): no management interface, optional token."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import aclosing

from models.progress import ProgressCallback, ignore_progress
from runtime.server.listening import bind, listen, stopped_by_signals
from runtime.server.security import Security
from runtime.server.service.service import Service
from runtime.wire.requests import LoadRequest

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


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
    """Serve `/v1/*` until Ctrl-C or SIGTERM. There is no `/runtime/*`: models cannot be pulled, made or deleted.

    Args:
        service: The service, from `runtime.server.store.loading.open_service`; closed at the end.
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
