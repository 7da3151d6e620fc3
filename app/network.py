"""Names of servers, and detection of a network connection without sending anything."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

_PROXIES = ("https_proxy", "http_proxy", "all_proxy")
_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses reserved for documentation (RFC 5737, RFC 3849); only the route to them is looked up."""


def host_of(url: str) -> str:
    """A server's display name: its host, with the port if one is given."""
    return urlsplit(url).netloc


def offline() -> bool:
    """Whether downloads are impossible: forbidden by HF_HUB_OFFLINE, or this machine has no route out."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return False
    return not any(_reachable(family, address) for family, address in _ADDRESSES)


def _reachable(family: int, address: str) -> bool:
    try:
        with socket.socket(
            family, socket.SOCK_DGRAM
        ) as probe:  # connecting a UDP socket looks up the route and sends nothing
            probe.connect((address, 443))
    except OSError:
        return False
    return True
