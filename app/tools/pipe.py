"""Pipe: a server that runs as a program, over its standard input and output.

The official client reads lines of any length and starts the program with some of our environment. Here a line has a
limit, a server that floods us is slowed down instead of read, its standard error goes into a log that has a limit too,
and whatever it started is ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from app.tools.config import ServerConfig

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_LINE = 2**22
"""Most bytes of a message."""
MESSAGES_PER_S, BYTES_PER_S = 200, 2**22
"""A server that sends more is read this fast on average."""
END_S = 1.0
"""Seconds for a server to end by itself when its input is closed, and again after SIGTERM."""
LOG_LINES, LOG_WIDTH = 400, 1000


class Log:
    """The last lines of a server's log.

    Args:
        hide: Removes secrets from a line.
    """

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


@asynccontextmanager
async def pipe(config: ServerConfig, log: Log) -> AsyncIterator[TransportStreams]:
    """Start a server's program, and end it and all that it started.

    Args:
        config: The server.
        log: Receives its standard error, and what it says on standard output that is no message.

    Raises:
        OSError: it can't be started.
    """
    process = await asyncio.create_subprocess_exec(
        config.command,
        *config.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=config.environment(),
        cwd=config.cwd or Path.home(),
        start_new_session=sys.platform != "win32",
        limit=2**16,
    )
    arrived, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, waiting = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_messages(process, arrived, log)),
        asyncio.create_task(_noise(process, log)),
        asyncio.create_task(_send(process, waiting, arrived)),
    ]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_end(process)))
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (arrived, read, write, waiting):
            stream.close()


async def _messages(process: asyncio.subprocess.Process, arrived: Any, log: Log) -> None:
    """Pass the server's messages on, until it ends or sends a line that is too long."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    buffer, credit, size, since = bytearray(), float(MESSAGES_PER_S), float(BYTES_PER_S), loop.time()
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while chunk := await process.stdout.read(2**16):
            now = loop.time()
            credit = min(MESSAGES_PER_S, credit + (now - since) * MESSAGES_PER_S)
            size, since = min(BYTES_PER_S, size + (now - since) * BYTES_PER_S) - len(chunk), now
            at = len(buffer)
            buffer += chunk
            while (end := buffer.find(b"\n", at)) >= 0:
                line, at = bytes(buffer[:end]), 0
                del buffer[: end + 1]
                credit -= 1
                if credit < 0:
                    await asyncio.sleep(1 / MESSAGES_PER_S)
                if line.strip():
                    await _pass_on(line, arrived, log)
            if len(buffer) > MAX_LINE:
                log.add(f"the server sent a message of more than {MAX_LINE:,} bytes, and was ended")
                break
            if size < 0:
                await asyncio.sleep(-size / BYTES_PER_S)
    arrived.close()


async def _pass_on(line: bytes, arrived: Any, log: Log) -> None:
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        log.add(f"not a message: {line[:LOG_WIDTH].decode('utf-8', 'replace')}")
        return
    await arrived.send(SessionMessage(message))


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


async def _send(process: asyncio.subprocess.Process, waiting: Any, arrived: Any) -> None:
    assert process.stdin is not None
    try:
        async for one in waiting:
            text: str = one.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()
    except (OSError, anyio.ClosedResourceError):
        arrived.close()  # requests fail at once rather than when their time is up


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, then end the program and its children, first politely."""
    if process.stdin is not None:
        process.stdin.close()
    if not await _ended(process):
        _signal(process, signal.SIGTERM)
        if not await _ended(process):
            _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
            await _ended(process)
    _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))  # children that outlived it
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()  # a child that left the group may hold the pipes open


async def _ended(process: asyncio.subprocess.Process) -> bool:
    """Whether it ends soon. `wait` would also wait for pipes that its children hold open."""
    deadline = asyncio.get_running_loop().time() + END_S
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  no event tells
        await asyncio.sleep(0.01)
    return process.returncode is not None


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
