"""Requests to the hub that survive a bad network and can be cancelled at any moment.

A request runs in its own thread, so that the caller never blocks in a read: it checks `cancelled` ten times per second,
and hashes and writes while the next bytes arrive.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from models.errors import CancelledError, HubError, HubUnreachableError
from models.foreign import parse_json
from models.progress import Cancelled

if TYPE_CHECKING:
    import httpx

_POLL_S = 0.1
"""Interval in seconds at which the caller checks for cancellation."""
_JOIN_S = 0.5
"""Seconds to wait for the thread of an abandoned request; one that blocks in a connect ends by itself later."""
_QUEUE_PIECES = 16
"""Maximum number of pieces (64 KiB or less) waiting to be written, which a kill loses."""
_MAX_REDIRECTS = 8
_MAX_JSON_BYTES = 64 << 20
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TRANSIENT_STATUS = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Timeouts and retries."""

    connect_s: float = 10.0
    stall_s: float = 30.0
    """A connection without data for this many seconds is replaced by a new one."""
    first_attempts: int = 3
    attempts: int = 10
    """Number of consecutive attempts without a new byte, once a download has started."""
    first_delay_s: float = 0.5
    """Pause in seconds after a failed attempt; it doubles with each further one."""
    longest_delay_s: float = 30.0
    """Maximum pause in seconds, also for one that the hub requests."""

    def __post_init__(self) -> None:
        if min(self.connect_s, self.stall_s, self.first_delay_s, self.longest_delay_s) <= 0:
            raise ValueError("times must be positive")
        if min(self.first_attempts, self.attempts) < 1:
            raise ValueError("there must be at least one try")

    def delay(self, failures: int, asked: float | None) -> float:
        """Pause in seconds after a number of failed attempts; `asked` is the hub's Retry-After."""
        backoff = self.first_delay_s * 2.0 ** (failures - 1)
        return min(self.longest_delay_s, max(backoff, asked or 0.0))


class Interrupted(Exception):
    """An attempt failed in a way that may succeed next time."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: Mapping[str, str]
    """Headers of the last response, case-insensitive."""
    linked_etag: str | None
    """The hub's digest of the file, if a response included one."""
    on_hub: bool
    """Whether the hub itself responded, not the storage that it redirects to."""


class Retries:
    """Counts failed attempts and waits between them."""

    def __init__(self, policy: Policy, attempts: int, cancelled: Cancelled, note: Callable[[str], None]) -> None:
        self._policy = policy
        self._attempts = attempts
        self._cancelled = cancelled
        self._note = note
        self._failures = 0

    def progressed(self) -> None:
        self._failures = 0

    def failed(self, error: Interrupted, what: str) -> None:
        """Wait for the next attempt.

        Raises:
            HubUnreachableError: that was the last one.
            CancelledError: `cancelled` returned True.
        """
        self._failures += 1
        if self._failures >= self._attempts:
            tries = "1 try" if self._failures == 1 else f"{self._failures} tries"
            raise HubUnreachableError(
                f"{what}: {error}, after {tries}. Check the network (and HTTPS_PROXY, HF_ENDPOINT if set); the "
                "same command continues the download."
            ) from error
        delay = self._policy.delay(self._failures, error.retry_after_s)
        self._note(f"{what}: {error}; trying again{f' in {delay:.0f} s' if delay >= 0.5 else ''}")
        end = time.monotonic() + delay
        while (left := end - time.monotonic()) > 0:
            stop_if(self._cancelled)
            time.sleep(min(_POLL_S, left))


class Transport:
    """A connection to one hub. Close it, or use it as a context manager."""

    def __init__(self, endpoint: str, token: str | None, policy: Policy, cancelled: Cancelled) -> None:
        """Prepare without sending anything.

        Raises:
            HubError: the endpoint is no web address, or the proxy settings cannot be used.
        """
        import httpx

        if urlsplit(endpoint).scheme not in _DEFAULT_PORTS or not urlsplit(endpoint).hostname:
            raise HubError(
                f"HF_ENDPOINT is {without_login(endpoint)!r}: give the hub's address, as in https://huggingface.co."
            )
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
        """Send a GET request for a path of the hub, and follow redirects.

        Raises:
            Interrupted: the network failed before a response arrived.
            HubError: the hub redirects to an unsafe address.
            CancelledError: `cancelled` returned True.
        """
        running = Exchange(self._client, self.endpoint, path, {**self._headers, **(headers or {})}, self.cancelled)
        try:
            yield running
        finally:
            running.close()

    def read_json(
        self, path: str, what: str, refuse: Callable[[Head, bytes], None], note: Callable[[str], None]
    ) -> dict[str, Any]:
        """Read a JSON object, with retries.

        Args:
            path: Below the endpoint, with its query.
            what: What is being read, for messages.
            refuse: Called with each response that is neither 200 nor transient; raises the matching error.
            note: Receives a line before each pause.

        Raises:
            HubUnreachableError: no attempt succeeded.
            HubError: the response is not a hub's.
            CancelledError: `cancelled` returned True.
        """
        retries = Retries(self.policy, self.policy.first_attempts, self.cancelled, note)
        while True:
            try:
                with self.exchange(path) as exchange:
                    body = bytearray()
                    for piece in exchange.pieces():
                        body += piece
                        if len(body) > _MAX_JSON_BYTES:
                            raise HubError(f"{what}: the response is far too long; is HF_ENDPOINT a hub?")
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
    """One response of the hub, read in its own thread."""

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
        """The pieces of the body; the caller checks that it is complete."""
        while isinstance(piece := self._take(), bytes):
            yield piece

    def close(self) -> None:
        """Close the connection if the body is incomplete."""
        self._stopped.set()
        if (connection := self._socket) is not None:
            with suppress(OSError):  # it may be closed already
                socket.socket.shutdown(
                    connection, socket.SHUT_RDWR
                )  # wakes the thread; a TLS socket's own shutdown does not
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
                self._socket = None  # it may already serve the next request
        except HubError as error:
            outcome = error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError) as error:
            outcome = explained(error, urlsplit(without_login(self._url)).netloc)
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
                host = urlsplit(without_login(self._url)).netloc
                raise HubError(f"{host} leads to an address that is not safe to follow.")
            if origin(target) != origin(self._url):
                headers.pop("authorization", None)
            self._url = target
        raise HubError(f"{without_login(self._endpoint)} redirects without end; is HF_ENDPOINT right?")


def stop_if(cancelled: Cancelled) -> None:
    if cancelled():
        raise CancelledError("the download was stopped; the same command continues it")


def without_login(url: str) -> str:
    """An address without user name and password, for messages."""
    return re.sub(r"//[^/?#]*@", "//", url)


def origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def raise_if_transient(head: Head) -> None:
    asked = head.headers.get("retry-after", "")
    retry_after_s = float(asked) if asked.isascii() and asked.isdigit() else None
    if head.status in _TRANSIENT_STATUS or head.status >= 500:
        who = "the hub" if head.on_hub else "the hub's storage"
        raise Interrupted(f"{who} answers {head.status}", retry_after_s)
    if not head.on_hub and head.status >= 400 and head.status != 416:
        raise Interrupted(f"the hub's storage answers {head.status}")


def explained(error: Exception, host: str) -> Interrupted | HubError:
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
        return Interrupted(f"{host} stopped sending data")
    return Interrupted("the connection was cut")


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(body)
    except ValueError as error:
        raise HubError(
            f"{what}: the response is not JSON; is HF_ENDPOINT a hub, or is a login page in between?"
        ) from error
    if not isinstance(value, dict):
        raise HubError(f"{what}: the response is not a JSON object; is HF_ENDPOINT a hub?")
    return value
