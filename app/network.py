"""Whether there is a network, told without sending anything."""

from __future__ import annotations

import os
import socket

_PROXIES = ("https_proxy", "http_proxy", "all_proxy")
_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that belong to nobody (RFC 5737, RFC 3849): only the way out to them is looked up."""


def offline() -> bool:
    """Whether nothing can be fetched: it is forbidden (HF_HUB_OFFLINE), or no way leads out of this machine."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return False
    return not any(_reachable(family, address) for family, address in _ADDRESSES)


def _reachable(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting one looks up the route and sends nothing
            probe.connect((address, 443))
    except OSError:
        return False
    return True
