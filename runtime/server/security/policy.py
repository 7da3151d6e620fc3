"""Security policy: the requirements on requests, fixed when the server starts."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from runtime.errors import RequestError
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
    return hmac.compare_digest(token.strip(), wanted.encode("ascii")) and scheme.lower() == b"bearer"
