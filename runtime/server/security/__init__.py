"""Who may ask the server what.

A web page that a person happens to visit can make their browser send requests to loopback. So every request's `Host`
must be one that this server is known by: a name under somebody else's control that was pointed at loopback (DNS
rebinding) is refused. An `Origin`, which browsers add, must be the server itself. Beyond loopback a token is needed.
"""

from runtime.server.security.guard import Guard
from runtime.server.security.policy import MAX_BODY_BYTES, Security

__all__ = ["MAX_BODY_BYTES", "Guard", "Security"]
