"""Security: access control of the server.

A web page that the user visits can make the browser send requests to loopback. So every request's `Host` must be a
known name of this server: a foreign name that resolves to loopback (DNS rebinding) is rejected. An `Origin`, which
browsers add, must be the server itself. Servers beyond loopback require a token.
"""

from runtime.server.security.guard import Guard
from runtime.server.security.policy import MAX_BODY_BYTES, Security

__all__ = ["MAX_BODY_BYTES", "Guard", "Security"]
