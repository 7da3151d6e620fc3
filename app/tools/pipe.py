"""Pipe: a server that runs as a program, over its standard input and output.

The official client reads lines of any length and starts the program with some of our environment. Here a line has a
limit, a server that floods us is slowed down instead of read, a request whose answer can't be read fails at once, the
server's standard error goes into a log that has a limit too, and whatever it started is ended with it
(`app.tools.subreaper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from app.tools import subreaper
from app.tools.config import ServerConfig
from app.tools.contents import message_of, read_message

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_LINE = 2**22
"""Most bytes of a message."""
MESSAGES_PER_S, BYTES_PER_S = 200, 2**22
"""A server that sends more is read this fast on average."""
END_S = 1.0
"""Seconds for a server to end by itself when its input is closed, and again after SIGTERM."""
GARBLED_S = 10.0
"""Seconds that an answer may take after something that is no message: it may have been the answer."""
KILL_S = 3.0
"""Seconds for all that it started to be killed, on a busy machine too."""
LOG_LINES, LOG_WIDTH = 400, 1000
_LIKE_MESSAGE = re.compile(rb'"(?:jsonrpc|id|result|error)"\s*:')
_ID = re.compile(rb'"id"\s*:\s*"?(\d{1,18})')


class Log:
    """The last lines of a server's log."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._hide = hide

    def add(self, line: str) -> None:
        """Add a line."""
        self._lines.append(self._hide(line.rstrip("\n"))[:LOG_WIDTH])

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self._lines)

    @property
    def last(self) -> str:
        """The last line that says something."""
        return next((line.strip() for line in reversed(self._lines) if line.strip()), "")


class Pace:
    """Slows down whoever reads what a server sends too fast."""

    def __init__(self) -> None:
        self._messages, self._bytes, self._since = float(MESSAGES_PER_S), float(BYTES_PER_S), time.monotonic()

    async def keep(self, messages: int, size: int) -> None:
        """Wait until it is time for this many more messages and bytes."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self._messages = min(MESSAGES_PER_S, self._messages + passed * MESSAGES_PER_S) - messages
        self._bytes = min(BYTES_PER_S, self._bytes + passed * BYTES_PER_S) - size
        if (wait_s := max(-self._messages / MESSAGES_PER_S, -self._bytes / BYTES_PER_S)) > 0:
            await asyncio.sleep(wait_s)


@asynccontextmanager
async def pipe(config: ServerConfig, log: Log) -> AsyncIterator[TransportStreams]:
    """Start a server's program, and end it and all that it started.

    Args:
        config: The server.
        log: Receives its standard error, and what it says on standard output that is no message.

    Raises:
        OSError: it can't be started.
    """
    leash, process = await _started(config)
    arrived, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, waiting = anyio.create_memory_object_stream[SessionMessage](0)
    received = Received(arrived, log)
    assert process.stdin is not None, "it was started with pipes"
    assert process.stdout is not None, "it was started with pipes"
    tasks = [
        asyncio.create_task(receive(process.stdout, received)),
        asyncio.create_task(_noise(process, log)),
        asyncio.create_task(_send(process.stdin, waiting, received)),
    ]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_end(process, leash)))
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (arrived, read, write, waiting):
            stream.close()


async def _started(config: ServerConfig) -> tuple[socket.socket, asyncio.subprocess.Process]:
    """The process that runs the server's program, and the leash that ends it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    pipe = asyncio.subprocess.PIPE
    bare = sys.platform == "win32"
    before = () if bare else (sys.executable, "-I", "-S", subreaper.__file__, str(theirs.fileno()), str(END_S))
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *before,
            config.command,
            *config.args,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=config.environment(),
            cwd=config.cwd or Path.home(),
            limit=2**16,
            start_new_session=not bare,
            pass_fds=() if bare else (theirs.fileno(),),
        )
        theirs.close()
        problem = int(await asyncio.get_running_loop().sock_recv(ours, 16) or b"0") if before else 0
        if problem:
            raise OSError(problem, os.strerror(problem))
    except BaseException:
        theirs.close()
        ours.close()
        if process is not None:
            await asyncio.shield(asyncio.ensure_future(_end(process, ours)))
        raise
    return ours, process


class Received:
    """What a server's lines say, and which requests it has not answered.

    Args:
        arrived: Receives the messages.
        log: Receives what is no message.
    """

    def __init__(self, arrived: Any, log: Log) -> None:
        self._arrived, self.log = arrived, log
        self._asked: dict[types.RequestId, str] = {}  # methods of the requests without an answer
        self._garbled = ""  # what may have been the answer to one of them

    def ask(self, message: types.JSONRPCMessage) -> None:
        """Note a message to the server."""
        if isinstance(message, types.JSONRPCRequest):
            self._asked[message.id] = message.method

    async def take(self, line: bytes) -> None:
        """Pass the messages of a line on. If it is none, a request that it may answer fails."""
        try:
            found = read_message(line)
        except ValueError:
            shown = line[:LOG_WIDTH].decode("utf-8", "replace")
            self.log.add(f"not a message: {shown}")
            if _LIKE_MESSAGE.search(line) and b'"method"' not in line:
                meant = self._asked.keys() & {int(one) for one in _ID.findall(line)}
                await self._fail(meant or list(self._asked), shown)
            else:
                self._doubt(shown)
            return
        for one in found if isinstance(found, list) else [found]:
            message = message_of(one)
            if message is None:
                shown = line[:LOG_WIDTH].decode("utf-8", "replace")
                self.log.add(f"not a message: {shown}")
                self._doubt(shown)
                continue
            if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                known = message.id if message.id in self._asked else _number(message.id)
                if known not in self._asked:
                    self._doubt(f"an answer to {message.id!r}")
                    continue
                message.id = known
                del self._asked[known]
            self._garbled = ""
            await self._arrived.send(SessionMessage(message))

    def _doubt(self, shown: str) -> None:
        if "initialize" not in self._asked.values():  # npx and uvx may say something first
            self._garbled = shown if self._asked else ""

    @property
    def patience_s(self) -> float | None:
        """How long to wait for the next line; None: as long as it takes."""
        return GARBLED_S if self._garbled else None

    async def give_up(self) -> None:
        """Fail what waits for an answer."""
        await self._fail(list(self._asked), self._garbled)
        self._garbled = ""

    async def _fail(self, ids: Iterable[types.RequestId], shown: str) -> None:
        for one in ids:
            del self._asked[one]
            error = types.ErrorData(code=types.PARSE_ERROR, message=shown)
            await self._arrived.send(SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=one, error=error)))

    def close(self) -> None:
        """Let all requests fail, because the server is gone."""
        self._arrived.close()


def _number(given: types.RequestId | None) -> types.RequestId | None:
    """An id as we wrote it, where a server made text of it."""
    return int(given) if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 19 else given


async def receive(stream: asyncio.StreamReader, received: Received) -> None:
    """Take the server's lines, until it ends or sends one that is too long."""
    buffer, pace = bytearray(), Pace()
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            try:
                async with asyncio.timeout(received.patience_s):
                    chunk = await stream.read(2**16)
            except TimeoutError:
                await received.give_up()
                continue
            if not chunk:
                break
            at = len(buffer)
            buffer += chunk
            while (end := buffer.find(b"\n", at)) >= 0:
                line, at = bytes(buffer[:end]), 0
                del buffer[: end + 1]
                await pace.keep(1, len(line))
                if line.strip():
                    await received.take(line)
            if len(buffer) > MAX_LINE:
                received.log.add(f"the server sent a message of more than {MAX_LINE:,} bytes, and was stopped")
                break
    received.close()


async def _noise(process: asyncio.subprocess.Process, log: Log) -> None:
    """Keep the end of what the server says on standard error."""
    assert process.stderr is not None
    begun = b""
    while chunk := await process.stderr.read(2**14):
        *lines, begun = (begun + chunk).split(b"\n")
        for line in lines[-LOG_LINES:]:
            log.add(line.decode("utf-8", "replace"))
        begun = begun[-LOG_WIDTH:]
        await asyncio.sleep(0.01)
    if begun:
        log.add(begun.decode("utf-8", "replace"))


async def _send(stream: asyncio.StreamWriter, waiting: Any, received: Received) -> None:
    try:
        async for one in waiting:
            received.ask(one.message)
            text = json.dumps(one.message.model_dump(by_alias=True, exclude_unset=True))
            stream.write(text.encode() + b"\n")
            await stream.drain()
    except (OSError, anyio.ClosedResourceError):
        received.close()  # requests fail at once rather than when their time is up


async def _end(process: asyncio.subprocess.Process, leash: socket.socket) -> None:
    """Close the program's input, then end it and all that it started, first politely."""
    if process.stdin is not None:
        process.stdin.close()
    ended = await _ended(process, END_S)
    leash.close()
    if not ended:
        await _ended(process, 2 * END_S + KILL_S)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()  # ends what is still there; a child that left the group may hold the pipes open


async def _ended(process: asyncio.subprocess.Process, most_s: float) -> bool:
    """Whether it ends soon. `wait` would also wait for pipes that its children hold open."""
    deadline = asyncio.get_running_loop().time() + most_s
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  no event tells
        await asyncio.sleep(0.01)
    return process.returncode is not None
