"""A hub on the loopback: the part of the Hugging Face hub's protocol that downloads use, with faults to switch on.

Two addresses answer: the hub, and a storage that it redirects large files to, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", "tokenizer.json", ".gguf")
PIECE = 16 << 10


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong from now on."""

    bytes_per_s: float | None = None
    """Speed of every body."""
    cut_after: dict[str, deque[int]] = field(default_factory=dict)
    """By file: after how many bytes of its next body the connection is cut; one entry per body."""
    wrong_bytes: dict[str, int] = field(default_factory=dict)
    """By file: how many bodies come with a flipped bit."""
    statuses: deque[tuple[str, int, dict[str, str]]] = field(default_factory=deque)
    """Answers for the next requests whose path contains the text: status and headers. Each is used once."""
    always: tuple[str, int, dict[str, str]] | None = None
    """The same, for every such request."""
    no_ranges: bool = False
    """Range is ignored."""
    wrong_range: bool = False
    """The answer to a range begins elsewhere."""
    shifted: bool = False
    """Content-Length and body are longer than listed."""
    linked_etag: str | None = None
    """What the hub says in X-Linked-Etag instead of the truth."""
    storage_version: int = 0
    """Changes the storage's ETags."""
    token: str | None = None
    """The only token that opens a file."""
    hang: tuple[str, threading.Event] | None = None
    """The bodies of a file wait for the event after their first piece."""
    location: str | None = None
    """Where large files are redirected to instead of the storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the server saw it."""

    method: str
    path: str
    file: str | None
    """Name of the file whose content is asked for, where it is sent, not where it is redirected."""
    start: int
    """First byte asked for."""
    if_range: str | None
    authorization: str | None
    storage: bool


class HubServer:
    """Holds repositories and serves them until `close`."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        """Name → commit → file → content."""
        self.refs: dict[tuple[str, str], str] = {}
        """(Name, revision) → commit."""
        self.faults = Faults()
        self.log: list[Request] = []
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(storage)) for storage in (False, True)]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def storage_url(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit; returns its hash."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode())
        commit = digest.hexdigest()
        self.repos.setdefault(name, {})[commit] = files
        self.refs[name, revision] = commit
        return commit

    def sent(self, file: str | None = None) -> list[Request]:
        """Requests that were answered with content, of one file or of all."""
        return [entry for entry in self.log if entry.file is not None and file in (None, entry.file)]

    def close(self) -> None:
        if self.faults.hang is not None:
            self.faults.hang[1].set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _handler(self, storage: bool) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_Handler,), {"hub": self, "storage": storage})


def digest_of(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a short body waits 40 ms for the client to acknowledge its headers
    hub: HubServer
    storage: bool

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self._fault(path)
        if fault is not None:
            self._entry(None)
            self._answer(fault[0], b"something is wrong\n", fault[1])
        elif self.storage:
            _, commit, name, file = path.split("|")
            self._content(self.hub.repos[name][commit], name, commit, file)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
            self._entry(None)
            self._listing(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._entry(None)
            self._answer(404, b"Not Found", {})

    def _fault(self, path: str) -> tuple[int, dict[str, str]] | None:
        faults = self.hub.faults
        if faults.always is not None and faults.always[0] in path:
            return faults.always[1], faults.always[2]
        if faults.statuses and faults.statuses[0][0] in path:
            _, status, headers = faults.statuses.popleft()
            return status, headers
        return None

    def _entry(self, file: str | None) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.hub.log.append(
            Request(
                method=self.command,
                path=self.path,
                file=file,
                start=int(match[1]) if match else 0,
                if_range=self.headers.get("If-Range"),
                authorization=self.headers.get("Authorization"),
                storage=self.storage,
            )
        )

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _listing(self, name: str, kind: str, revision: str) -> None:
        commits = self.hub.repos.get(name)
        if commits is None:
            self._answer(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
            return
        commit = self.hub.refs.get((name, revision), revision)
        if commit not in commits:
            self._answer(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
            return
        entries: list[dict[str, Any]] = []
        for file, content in commits[commit].items():
            digest, size = digest_of(file, content), len(content)
            key = "oid" if kind == "tree" else "sha256"
            lfs = {"lfs": {key: digest, "size": size, "pointerSize": 130}} if len(digest) == 64 else {}
            oid = digest if len(digest) == 40 else hashlib.sha1(digest.encode()).hexdigest()
            if kind == "tree":
                entries.append({"type": "file", "path": file, "size": size, "oid": oid, **lfs})
            else:
                entries.append({"rfilename": file, "size": size, "blobId": oid, **lfs})
        answer: Any = entries if kind == "tree" else {"id": name, "sha": commit, "siblings": entries, "gated": False}
        if kind == "revision" and "blobs" not in parse_qs(urlsplit(self.path).query):
            answer["siblings"] = [{"rfilename": entry["rfilename"]} for entry in entries]
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        faults, commits = self.hub.faults, self.hub.repos.get(name, {})
        commit = self.hub.refs.get((name, revision), revision)
        if faults.token is not None and self.headers.get("Authorization") != f"Bearer {faults.token}":
            self._entry(None)
            self._answer(403, b"Access to this model is restricted.", {"X-Error-Code": "GatedRepo"})
        elif commit not in commits or file not in commits[commit]:
            self._entry(None)
            self._answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif file.endswith(LARGE):
            self._entry(None)
            content = commits[commit][file]
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{faults.linked_etag or digest_of(file, content)}"',
                "X-Linked-Size": str(len(content)),
                "Location": faults.location or f"{self.hub.storage_url}/|{commit}|{name}|{file}",
            }
            self._answer(302, b"Found. Redirecting", headers)
        else:
            self._content(commits[commit], name, commit, file)

    def _content(self, files: dict[str, bytes], name: str, commit: str, file: str) -> None:
        self._entry(file if self.command == "GET" else None)
        faults, content = self.hub.faults, files[file]
        etag = f'"{digest_of(file, content)}"' if not self.storage else f'"storage-{faults.storage_version}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start, status = self.hub.log[-1].start, 200
        fits = self.headers.get("If-Range") in (None, etag)
        if "Range" in self.headers and fits and not faults.no_ranges:
            if start >= len(content):
                self._answer(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
                return
            status = 206
            begin = start - 1 if faults.wrong_range else start
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            body = content[start:]
        else:
            body = content
        if faults.shifted:
            body += b"more"
        if faults.wrong_bytes.get(file, 0) > 0:
            faults.wrong_bytes[file] -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        self._send(status, headers, body, file)

    def _send(self, status: int, headers: dict[str, str], body: bytes, file: str) -> None:
        faults = self.hub.faults
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = faults.cut_after.get(file)
        end = cuts.popleft() if cuts else len(body)
        begun = time.monotonic()
        for at in range(0, min(end, len(body)), PIECE):
            self.wfile.write(body[at : min(at + PIECE, end)])
            if faults.hang is not None and faults.hang[0] == file:
                faults.hang[1].wait()
            if faults.bytes_per_s is not None:
                time.sleep(max(0.0, begun + (at + PIECE) / faults.bytes_per_s - time.monotonic()))
        if end < len(body):
            self.close_connection = True
