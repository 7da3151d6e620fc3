"""Names and addresses of hosts, in one form, and which of them are this machine itself."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address


def plain_host(host: str) -> str:
    """A host in the one form in which it is compared: lower case, no brackets, no trailing dot, shortest address."""
    plain = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    address = address_of(plain)
    return plain if address is None else str(address)


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, reached by no other. A name other than localhost may be anything."""
    plain = plain_host(host)
    address = address_of(plain)
    # What follows a % in an address would name a network card, and may be any text: it has no place in a URL.
    return plain == "localhost" if address is None else address.is_loopback and "%" not in plain
