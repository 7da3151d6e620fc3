"""Host names and addresses: normalization and loopback detection."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address


def plain_host(host: str) -> str:
    """Normalize a host for comparison: lower case, no brackets, no trailing dot, shortest address."""
    plain = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    address = address_of(plain)
    return plain if address is None else str(address)


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a host denotes; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can be reached under a host. Names other than localhost may resolve to anything."""
    plain = plain_host(host)
    address = address_of(plain)
    # A scope id (after %) names a network interface and may be any text: it does not belong in a URL.
    return plain == "localhost" if address is None else address.is_loopback and "%" not in plain
