"""Requests to the hub that survive a bad network and can be stopped at any moment.

A request runs in a thread of its own, so that the caller is never stuck in a read: it asks `cancelled` ten times a
second, and the next bytes are on their way while it hashes and writes the last ones.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from models.errors import CancelledError, HubError, HubUnreachableError
from models.progress import Cancelled

if TYPE_CHECKING:
    import httpx

_POLL_S = 0.1
"""How often the caller looks whether to stop."""
_JOIN_S = 0.5
"""How long to wait for the thread of a request that is given up; one stuck in a connect ends by itself later."""
_QUEUE_PIECES = 16
"""Pieces (64 KiB or less) that may wait to be written: what a kill can lose."""
_MAX_REDIRECTS = 8
_MAX_JSON_BYTES = 64 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TRANSIENT_STATUS = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long to wait, and how often to try again."""

    connect_s: float = 10.0
    """Time for a connection to be made."""
    stall_s: float = 30.0
    """A connection on which nothing comes for this time is given up and made anew."""
    first_attempts: int = 3
    """Tries to reach the hub at all."""
    attempts: int = 10
    """Tries in a row without a new byte, once a download is on its way."""
    first_delay_s: float = 0.5
    """Pause after a failed try; it doubles with every further one."""
    longest_delay_s: float = 30.0
    """The pause does not grow beyond this, nor does one that the hub asks for."""

    def __post_init__(self) -> None:
        if min(self.connect_s, self.stall_s, self.first_delay_s, self.longest_delay_s) <= 0:
            raise ValueError("times must be positive")
        if min(self.first_attempts, self.attempts) < 1:
            raise ValueError("there must be at least one try")

    def delay(self, failures: int, asked: float | None) -> float:
        """Pause in seconds after so many failed tries; `asked` is what the hub wants (Retry-After)."""
        backoff = self.first_delay_s * 2.0 ** (failures - 1)
        return min(self.longest_delay_s, max(backoff, asked or 0.0))


class Interrupted(Exception):
    """A try failed in a way that the next may not."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What an answer says before its body."""

    status: int
    headers: Mapping[str, str]
    """Of the last answer, case-insensitive."""
    linked_etag: str | None
    """The digest that the hub gives for the file, if it says one on the way."""
    on_hub: bool
    """Whether the hub itself answered, not the storage it redirects to."""


class Retries:
    """Counts failed tries and waits between them."""

    def __init__(self, policy: Policy, attempts: int, cancelled: Cancelled, note: Callable[[str], None]) -> None:
        self._policy = policy
        self._attempts = attempts
        self._cancelled = cancelled
        self._note = note
        self._failures = 0

    def progressed(self) -> None:
        """Something new came: the count begins anew."""
        self._failures = 0

    def failed(self, error: Interrupted, what: str) -> None:
        """Wait for the next try.

        Raises:
            HubUnreachableError: that was the last.
            CancelledError: `cancelled` says so.
        """
        self._failures += 1
        if self._failures >= self._attempts:
            tries = "1 try" if self._failures == 1 else f"{self._failures} tries"
            raise HubUnreachableError(
                f"{what}: {error}, after {tries}. Check the network (and HTTPS_PROXY, HF_ENDPOINT if set); what has "
                "come so far is kept, and the same command continues it."
            ) from error
        delay = self._policy.delay(self._failures, error.retry_after_s)
        self._note(f"{what}: {error}; trying again in {delay:.0f} s")
        end = time.monotonic() + delay
        while (left := end - time.monotonic()) > 0:
            stop_if(self._cancelled)
            time.sleep(min(_POLL_S, left))


class Transport:
    """Talks to one hub. Close it, or use it in a `with`."""

    def __init__(self, endpoint: str, token: str | None, policy: Policy, cancelled: Cancelled) -> None:
        """Nothing is sent yet.

        Raises:
            HubError: the endpoint is no web address, or the proxy settings cannot be used.
        """
        import httpx

        if urlsplit(endpoint).scheme not in _DEFAULT_PORTS or not urlsplit(endpoint).hostname:
            raise HubError(f"HF_ENDPOINT is {endpoint!r}: give the hub's address, as in https://huggingface.co.")
        self.endpoint = endpoint.rstrip("/")
        self.policy = policy
        self.cancelled = cancelled
        self._headers = {"user-agent": "lowbit-chat", "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        timeout = httpx.Timeout(policy.stall_s, connect=policy.connect_s)
        try:
            self._client = httpx.Client(timeout=timeout, follow_redirects=False)
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise HubError(
                f"the proxy or certificate settings cannot be used ({error}): check HTTPS_PROXY, ALL_PROXY and "
                "SSL_CERT_FILE."
            ) from error

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @contextmanager
    def exchange(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[Exchange]:
        """Send a GET for a path of the hub, and follow where it leads.

        Raises:
            Interrupted: the network failed before an answer came.
            HubError: the hub leads somewhere it should not.
            CancelledError: `cancelled` says so.
        """
        running = Exchange(self._client, self.endpoint, path, {**self._headers, **(headers or {})}, self.cancelled)
        try:
            yield running
        finally:
            running.close()

    def read_json(
        self, path: str, what: str, refuse: Callable[[Head, bytes], None], note: Callable[[str], None]
    ) -> dict[str, Any]:
        """Read a JSON object, with tries.

        Args:
            path: Below the endpoint, with its query.
            what: What is being read, for messages.
            refuse: Called with every answer that is not 200 and not transient; raises what it means.
            note: Receives a line before each pause.

        Raises:
            HubUnreachableError: no try succeeded.
            HubError: the answer is not what a hub says.
            CancelledError: `cancelled` says so.
        """
        retries = Retries(self.policy, self.policy.first_attempts, self.cancelled, note)
        while True:
            try:
                with self.exchange(path) as exchange:
                    body = bytearray()
                    for piece in exchange.pieces():
                        body += piece
                        if len(body) > _MAX_JSON_BYTES:
                            raise HubError(f"{what}: the answer is far too long; is HF_ENDPOINT a hub?")
                    raise_if_transient(exchange.head)
                    if exchange.head.status != 200:
                        refuse(exchange.head, bytes(body))
                    declared = exchange.head.headers.get("content-length")
                    if declared is not None and declared != str(len(body)):
                        raise Interrupted("the connection was cut")
                return _json_object(bytes(body), what)
            except Interrupted as error:
                retries.failed(error, what)


class Exchange:
    """One answer of the hub, read by a thread of its own."""

    def __init__(
        self, client: httpx.Client, endpoint: str, path: str, headers: dict[str, str], cancelled: Cancelled
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._url = endpoint + path
        self._headers = headers
        self._cancelled = cancelled
        self._queue: queue.Queue[Head | bytes | Exception | None] = queue.Queue(_QUEUE_PIECES)
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._work, name="hub-download", daemon=True)
        self._thread.start()
        try:
            head = self._take()
            if not isinstance(head, Head):
                raise Interrupted("the connection was cut")
            self.head = head
        except BaseException:
            self.close()
            raise

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes, up to where it ends: the caller checks whether that is the whole.

        Raises:
            Interrupted: the network failed.
            CancelledError: `cancelled` says so.
        """
        while isinstance(piece := self._take(), bytes):
            yield piece

    def close(self) -> None:
        """End the connection, if the body has not come to its end."""
        self._stopped.set()
        if (connection := self._socket) is not None:
            with suppress(OSError):  # it may be closed already
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # wakes the thread; a TLS socket's own does not
        self._thread.join(timeout=_JOIN_S)

    def _take(self) -> Head | bytes | None:
        while True:
            stop_if(self._cancelled)
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            return item

    def _put(self, item: Head | bytes | Exception | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def _work(self) -> None:
        import httpx

        outcome: Exception | None = None
        try:
            response, linked_etag = self._open()
            try:
                stream = response.extensions.get("network_stream")
                self._socket = stream.get_extra_info("socket") if stream is not None else None
                on_hub = origin(str(response.url)) == origin(self._endpoint)
                head = Head(
                    status=response.status_code, headers=response.headers, linked_etag=linked_etag, on_hub=on_hub
                )
                if self._put(head):
                    for piece in response.iter_raw():
                        if not self._put(piece):
                            return
            finally:
                response.close()
                self._socket = None  # it may serve the next request by now
        except HubError as error:
            outcome = error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError) as error:
            outcome = explained(error, urlsplit(self._url).netloc)
        finally:
            self._put(outcome)

    def _open(self) -> tuple[httpx.Response, str | None]:
        headers = dict(self._headers)
        linked_etag: str | None = None
        for _ in range(_MAX_REDIRECTS):
            response = self._client.send(self._client.build_request("GET", self._url, headers=headers), stream=True)
            linked_etag = response.headers.get("x-linked-etag") or linked_etag
            if not response.has_redirect_location:
                return response, linked_etag
            target = urljoin(self._url, response.headers["location"])
            response.close()
            if urlsplit(target).scheme not in _DEFAULT_PORTS or (
                self._url.startswith("https:") and not target.startswith("https:")
            ):
                raise HubError(f"{urlsplit(self._url).netloc} leads to an address that is not safe to follow.")
            if origin(target) != origin(self._url):
                headers.pop("authorization", None)
            self._url = target
        raise HubError(f"{self._endpoint} redirects without end; is HF_ENDPOINT right?")


def stop_if(cancelled: Cancelled) -> None:
    """Raise `CancelledError` if `cancelled` says so."""
    if cancelled():
        raise CancelledError(
            "the download was stopped; what has come so far is kept, and the same command continues it"
        )


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an address."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def raise_if_transient(head: Head) -> None:
    """Raise `Interrupted` for an answer that another try may change."""
    asked = head.headers.get("retry-after", "")
    retry_after_s = float(asked) if asked.isascii() and asked.isdigit() else None
    if head.status in _TRANSIENT_STATUS or head.status >= 500:
        who = "the hub" if head.on_hub else "the hub's storage"
        raise Interrupted(f"{who} answers {head.status}", retry_after_s)
    if not head.on_hub and head.status >= 400 and head.status != 416:
        raise Interrupted(f"the hub's storage answers {head.status}")


def explained(error: Exception, host: str) -> Interrupted | HubError:
    """What a failure of the network means, in a few words."""
    import httpx

    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return HubError(f"the certificate of {host} is not trusted ({text}): check the clock, or set SSL_CERT_FILE.")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return HubError(f"the hub leads to an address that cannot be used: {text}.")
    if isinstance(error, httpx.ConnectTimeout):
        return Interrupted(f"no connection to {host}")
    if isinstance(error, httpx.ProxyError):
        return Interrupted(f"the proxy refuses: {text}")
    if isinstance(error, httpx.ConnectError):
        return Interrupted(f"no connection to {host} ({text})")
    if isinstance(error, httpx.TimeoutException):
        return Interrupted(f"nothing comes from {host} any more")
    return Interrupted("the connection was cut")


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise HubError(
            f"{what}: the answer is not JSON; is HF_ENDPOINT a hub, or is a login page in between?"
        ) from error
    if not isinstance(value, dict):
        raise HubError(f"{what}: the answer is no JSON object; is HF_ENDPOINT a hub?")
    return value
