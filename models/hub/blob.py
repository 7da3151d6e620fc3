"""The download of one file from the hub: resumed where it stopped, verified, and only then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

from models.errors import HubError
from models.hub.cache import RepositoryCache, checksum
from models.hub.listing import Listing, RemoteFile, refused
from models.hub.meter import Meter, bytes_text
from models.hub.transport import Head, Interrupted, Retries, Transport, raise_if_transient, stop_if
from models.store.durable import explained, sync_folder

_PIECE_BYTES = 1 << 20
"""Bytes read from disk at a time."""


class DamagedError(Exception):
    """A file was downloaded completely, but its checksum is wrong."""


class Partial:
    """The downloaded part of a file, in `blobs/<digest>.incomplete`. A context manager.

    What touches the file raises a StoreError where the system refuses.
    """

    def __init__(self, path: Path, file: RemoteFile) -> None:
        """Open or create it."""
        self.path = path
        self.position = 0
        """Number of bytes on disk that are included in the checksum."""
        self._listed = file
        self._sum = checksum(file)
        with explained(f"cannot write {path}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take_up(self, found: Callable[[int], None], pause: Callable[[], None]) -> None:
        """Read the part that an earlier run left; discard it if it is too long."""
        with explained(f"cannot read {self.path}"):
            if os.fstat(self._file.fileno()).st_size > self._listed.size:
                self._file.truncate(0)
            while True:
                pause()
                piece = self._file.read(_PIECE_BYTES)
                if not piece:
                    return
                self._sum.update(piece)
                self.position += len(piece)
                found(len(piece))

    def write(self, piece: bytes) -> None:
        """Append bytes, unbuffered, so that they survive the death of this process.

        Raises:
            StoreError: the disk is full or the like; the existing part is kept.
        """
        view = memoryview(piece)
        with explained(f"cannot write {self.path}"):
            while view:
                written = self._file.write(view)
                self._sum.update(view[:written])
                self.position += written
                view = view[written:]

    def restart(self) -> None:
        """Discard the content."""
        with explained(f"cannot write {self.path}"):
            self._file.seek(0)
            self._file.truncate(0)
        self.position = 0
        self._sum = checksum(self._listed)

    def discard(self) -> None:
        """Delete the file; nothing can be written after that."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def settle(self, blob: Path) -> None:
        """Verify the checksum, sync the file and rename it.

        Raises:
            DamagedError: the checksum is wrong; the content is discarded.
            StoreError: a file operation failed.
        """
        if self._sum.hexdigest() != self._listed.digest:
            self.restart()
            raise DamagedError
        with explained(f"cannot write {blob}"):
            os.fsync(self._file.fileno())
            self._file.close()
            self.path.replace(blob)
            sync_folder(blob.parent)


class BlobDownload:
    """Downloads one file of a repository into the cache."""

    def __init__(
        self, cache: RepositoryCache, listing: Listing, file: RemoteFile, transport: Transport, meter: Meter
    ) -> None:
        self._cache = cache
        self._listing = listing
        self._file = file
        self._transport = transport
        self._meter = meter
        self._validator: str | None = None
        """The storage's version identifier of the file; valid within one run."""
        self._path = f"/{quote(listing.name)}/resolve/{listing.commit}/{quote(file.name)}"

    def run(self) -> bool:
        """Download the file unless it exists. Returns whether it was downloaded.

        Raises:
            HubError: the hub refuses, does not respond, or sends something other than what it lists.
            StoreError: the disk is full or the like.
            CancelledError: the work was asked to stop.
        """
        file, cache, meter = self._file, self._cache, self._meter
        meter.begin(file.name)
        if not cache.holds(self._listing.commit, file):
            waiting = f"{file.name}: another program is downloading it; waiting"
            with cache.lock(file.digest, self._transport.cancelled, lambda: meter.note(waiting)):
                if not cache.holds(self._listing.commit, file):
                    self._download()
                    return True
        meter.found(file.size)
        return False

    def _download(self) -> None:
        with Partial(self._cache.partial(self._file), self._file) as partial:
            partial.take_up(self._meter.found, lambda: stop_if(self._transport.cancelled))
            try:
                self._complete(partial)
            except DamagedError:
                self._meter.lost(self._file.size)
                self._meter.note(f"{self._file.name}: the checksum is wrong; downloading the file again")
                self._complete_again(partial)

    def _complete_again(self, partial: Partial) -> None:
        self._validator = None
        try:
            self._complete(partial)
        except DamagedError as error:
            partial.discard()
            raise HubError(
                f"{self._listing.name}: {self._file.name} came twice with a wrong checksum, so it is not kept: a proxy "
                "or a mirror (HTTPS_PROXY, HF_ENDPOINT) changes it, or this machine's memory or disk fails."
            ) from error

    def _complete(self, partial: Partial) -> None:
        policy = self._transport.policy
        retries = Retries(policy, policy.attempts, self._transport.cancelled, self._meter.note)
        farthest = partial.position
        while partial.position < self._file.size:
            try:
                self._attempt(partial)
            except Interrupted as error:
                if partial.position > farthest:
                    retries.progressed()
                retries.failed(error, self._file.name)
            farthest = max(farthest, partial.position)
        partial.settle(self._cache.blob(self._file))

    def _attempt(self, partial: Partial) -> None:
        headers = {}
        if partial.position:
            headers["range"] = f"bytes={partial.position}-"
            if self._validator is not None:
                headers["if-range"] = self._validator
        with self._transport.exchange(self._path, headers) as exchange:
            head = exchange.head
            if head.status == 416:
                self._restart(partial)
                raise Interrupted("the hub does not have this part")
            raise_if_transient(head)
            if head.status not in (200, 206):
                raise self._refusal(head)
            self._check_version(head, partial)
            self._place(head, partial)
            etag = head.headers.get("etag", "")
            self._validator = etag if etag.startswith('"') else None
            for piece in exchange.pieces():
                if partial.position + len(piece) > self._file.size:
                    self._restart(partial)
                    raise Interrupted("the hub sent more than it lists")
                partial.write(piece)
                self._meter.received(len(piece))
        if partial.position < self._file.size:
            raise Interrupted(f"the connection was cut at {bytes_text(partial.position)}")

    def _check_version(self, head: Head, partial: Partial) -> None:
        promised = (head.linked_etag or "").removeprefix("W/").strip('"')
        if promised and promised != self._file.digest:
            partial.discard()
            raise HubError(
                f"{self._listing.name}: {self._file.name} changed on the hub while it was downloaded; run the same "
                "command again to get the new one."
            )

    def _place(self, head: Head, partial: Partial) -> None:
        if head.status == 200:
            if partial.position:
                self._restart(partial)
            if head.headers.get("content-length", str(self._file.size)) != str(self._file.size):
                raise Interrupted("the hub sends a file of a different size than it lists")
            return
        expected = f"bytes {partial.position}-{self._file.size - 1}/{self._file.size}"
        if head.headers.get("content-range", "").strip().lower() != expected:
            self._restart(partial)
            raise Interrupted("the hub sent a different part than requested")

    def _restart(self, partial: Partial) -> None:
        self._meter.lost(partial.position)
        self._validator = None
        partial.restart()

    def _refusal(self, head: Head) -> HubError:
        return refused(head, b"", self._listing.name, self._listing.commit, self._file.name, self._transport.endpoint)
