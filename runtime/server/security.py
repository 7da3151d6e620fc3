"""Security: access control of the server.

A web page that the user visits can make the browser send requests to loopback. So every request's `Host` must be a
known name of this server: a foreign name that resolves to loopback (DNS rebinding) is rejected. An `Origin`, which
browsers add, must be the server itself. Servers beyond loopback require a token.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import RequestError
from runtime.server.bodies import error_answer
from runtime.server.errors import ApiError
from runtime.system.hosts import address_of, is_loopback, plain_host

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Largest body of a request."""
HEALTH_PATH = "/health"
"""Path that needs no token and only shows that the server is up, for programs that wait for it."""
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Requirements on requests. `for_bind` creates suitable ones for an address."""

    token: str | None = None
    """Bearer token of the public interface; None: no token required."""
    management_token: str | None = None
    """Bearer token of `/runtime/*`; None: no management interface."""
    hosts: frozenset[str] = _LOOPBACK_NAMES
    """Names and addresses allowed in `Host`, in lower case, without port and brackets."""
    any_address: bool = False
    """Whether any IP address is allowed there too; addresses cannot be rebound."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest body of a request."""

    def __post_init__(self) -> None:
        for token in (self.token, self.management_token):
            if token is not None and not _TOKEN.fullmatch(token):
                raise RequestError("a token must be 1 to 512 visible ASCII characters without spaces")

    def __repr__(self) -> str:
        return f"Security(hosts={sorted(self.hosts)}, any_address={self.any_address})"  # no token may appear in a log

    @classmethod
    def for_bind(
        cls, host: str, token: str | None, *, management_token: str | None = None, extra_hosts: Iterable[str] = ()
    ) -> Security:
        """The policy of a server that listens on `host`.

        Args:
            host: Address or name to bind.
            token: Bearer token of the public interface.
            management_token: Bearer token of `/runtime/*`.
            extra_hosts: Additional names of the server, for example behind a proxy.

        Raises:
            RequestError: the address is not loopback and there is no token, or a token is invalid.
        """
        local = is_loopback(host)
        if not local and token is None:
            raise RequestError(
                f"listening on {host or 'all addresses'} lets other machines in, so it needs a token: "
                "give one with --token, or listen on 127.0.0.1"
            )
        bound = plain_host(host)
        address = address_of(bound)
        named = set() if not bound or (address is not None and address.is_unspecified) else {bound}
        return cls(
            token=token,
            management_token=management_token,
            hosts=_LOOPBACK_NAMES | named | {plain_host(extra) for extra in extra_hosts},
            any_address=not local,
        )

    def accepts_host(self, authority: str) -> bool:
        """Whether a `Host` header names this server."""
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        host = plain_host(match["host"])
        address = address_of(host)
        return host in self.hosts or (self.any_address and address is not None and not address.is_unspecified)

    def accepts_origin(self, origin: str, authority: str) -> bool:
        """Whether an `Origin` header is this server itself, as named by `Host`."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == authority.lower()

    def wanted_token(self, path: str) -> str | None:
        """The token required for a path; None: no token required. Unknown paths count as public."""
        if path == HEALTH_PATH:
            return None
        return self.management_token if is_management(path) else self.token


def is_management(path: str) -> bool:
    """Whether a path is part of the management interface."""
    return path == "/runtime" or path.startswith("/runtime/")


def same_token(given: bytes, wanted: str) -> bool:
    """Whether an `Authorization` header has the right token. Takes constant time for tokens of the same length."""
    scheme, _, token = given.partition(b" ")
    return same_key(token, wanted) and scheme.lower() == b"bearer"


def same_key(given: bytes, wanted: str) -> bool:
    """Whether an `x-api-key` header has the right token. Takes constant time for tokens of the same length."""
    return hmac.compare_digest(given.strip(), wanted.encode("ascii"))


_REFUSED_HOST = (
    "this server does not go by the name in the Host header; use its address, for example http://127.0.0.1, "
    "or allow the name when the server is started"
)
_REFUSED_ORIGIN = "web pages from other sites may not use this server"


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
            await error_answer(refusal, scope["path"])(scope, receive, send)
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
        if wanted is not None and not _authorized(scope, wanted):
            return ApiError(
                401,
                "the token is missing or wrong: send it as 'Authorization: Bearer TOKEN', or as 'x-api-key: TOKEN'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        lengths = [value for value in _values(scope, b"content-length") if value.isdigit()]
        return _too_large(self._security.max_body_bytes) if any(self._exceeds(value) for value in lengths) else None

    def _exceeds(self, length: bytes) -> bool:
        return len(length) > 18 or int(length) > self._security.max_body_bytes


def _authorized(scope: Scope, wanted: str) -> bool:
    """Whether a request has the right token: in `Authorization` or, as Anthropic's clients send it, in `x-api-key`."""
    given, keys = _values(scope, b"authorization"), _values(scope, b"x-api-key")
    if len(given) == 1 and same_token(given[0], wanted):
        return True
    return len(keys) == 1 and not is_management(scope["path"]) and same_key(keys[0], wanted)


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
