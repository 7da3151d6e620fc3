"""The ASGI application: routes, error handlers, and the guard in front of them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from models.errors import ModelError
from runtime.errors import RuntimeFailure
from runtime.server.answer import error_answer
from runtime.server.errors import ApiError, api_error
from runtime.server.management import ManagementInterface
from runtime.server.openai.public import PublicInterface
from runtime.server.reading import Reader
from runtime.server.security import Guard, Security
from runtime.server.service.service import Service
from runtime.server.streaming import Disconnected

PING_S = 5.0
"""Seconds between keep-alive comments in an idle stream."""


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


async def _failure(_request: Request, error: Exception) -> Response:
    return error_answer(api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_answer(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _nobody_listens(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)
