"""Guard: access control in front of every route."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.answer import error_answer
from runtime.server.errors import ApiError
from runtime.server.security.policy import Security, is_management, same_token

_REFUSED_HOST = (
    "this server does not go by the name in the Host header; use its address, for example http://127.0.0.1, "
    "or allow the name when the server is started"
)
_REFUSED_ORIGIN = "web pages of other sites may not use this server"


class Guard:
    """ASGI middleware: checks Host, Origin, token and size of every request, in this order, before reading anything."""

    def __init__(self, app: ASGIApp, security: Security) -> None:
        self._app = app
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with 401, 403 or 413."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no websockets here; the server rejects the handshake
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_answer(refusal)(scope, receive, send)
            return
        await self._app(scope, _Limited(receive, self._security.max_body_bytes), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not self._security.accepts_host(hosts[0].decode("latin-1")):
            return ApiError(403, _REFUSED_HOST, code="host_not_allowed")
        host = hosts[0].decode("latin-1")
        if not all(self._security.accepts_origin(value.decode("latin-1"), host) for value in _values(scope, b"origin")):
            return ApiError(403, _REFUSED_ORIGIN, code="origin_not_allowed")
        if is_management(scope["path"]) and self._security.management_token is None:
            return ApiError(404, "this server has no management interface", code="not_found")
        wanted = self._security.wanted_token(scope["path"])
        given = _values(scope, b"authorization")
        if wanted is not None and not (len(given) == 1 and same_token(given[0], wanted)):
            return ApiError(
                401,
                "the bearer token is missing or wrong: send it as 'Authorization: Bearer TOKEN'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        lengths = [value for value in _values(scope, b"content-length") if value.isdigit()]
        return _too_large(self._security.max_body_bytes) if any(self._exceeds(value) for value in lengths) else None

    def _exceeds(self, length: bytes) -> bool:
        return len(length) > 18 or int(length) > self._security.max_body_bytes


class _Limited:
    """A request's body, limited in size whatever its headers say."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._read = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self._limit:
            raise _too_large(self._limit)
        return message


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the request is larger than {limit:,} bytes", code="request_too_large", headers={"Connection": "close"}
    )


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]
