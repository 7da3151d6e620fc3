"""Toolbox: all servers, in a thread with an event loop of its own.

Importing the protocol's client takes a second or more, and a server may send as much as it likes. In a thread of its
own neither holds up the screen. Methods may be called from any thread; `done` and `call` return futures.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from app.language import _
from app.tools.config import Secrets, ServerConfig, ToolsError
from app.tools.server import Offered, Progress, Result, Server, ServerTool

T = TypeVar("T")
MAX_NAME = 64
"""Most characters of a tool's name for the model."""
DIGITS = 8
_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_DIGEST = re.compile(rf"_[0-9a-f]{{{DIGITS}}}$")
CLOSE_S = 8.0
"""Longest wait for all servers to end: they get a second to do so by themselves, and another after SIGTERM."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool under the name that the model knows."""

    name: str
    """Its own name, with its server's before it where the file has several servers; see `model_name`."""
    tool: ServerTool

    def record(self) -> dict[str, Any]:
        """It in OpenAI's format."""
        said = {"name": self.name, "description": self.tool.description, "parameters": dict(self.tool.schema)}
        return {"type": "function", "function": said}


class Toolbox:
    """All servers of mcp.json.

    Args:
        configs: The servers.
        changed: Called in the toolbox's thread whenever a server's state or lists change.
    """

    def __init__(self, configs: Sequence[ServerConfig], changed: Callable[[], object] = lambda: None) -> None:
        self.secrets = Secrets(configs)
        self.servers: Sequence[Server] = ()
        self._configs, self._changed = configs, changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self) -> None:
        """Start the thread, and in it all servers that are not disabled. Returns at once."""
        if self._thread is not None or self._closed:
            return
        begun: Future[asyncio.AbstractEventLoop] = Future()

        async def live() -> None:
            self.servers = [Server(config, self.secrets, self._changed) for config in self._configs]
            self._stopped = asyncio.Event()
            for server in self.servers:
                server.start()
            begun.set_result(asyncio.get_running_loop())
            await self._stopped.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(live()), name="tools", daemon=True)
        self._thread.start()
        self._loop = begun.result()

    def close(self) -> None:
        """End all servers and the thread. Safe to call twice."""
        self._closed = True
        if self._thread is None or self._loop is None:
            return

        async def end() -> None:
            await asyncio.gather(*(server.close() for server in self.servers), return_exceptions=True)
            self._stopped.set()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self._loop)
            self._thread.join(CLOSE_S)

    @property
    def settled(self) -> bool:
        """Whether no server is starting."""
        return all(server.state != "starting" for server in self.servers)

    def stop(self, name: str) -> Future[None]:
        """End a server."""

        async def work() -> None:
            for server in self.servers:
                if server.name == name:
                    await server.close()

        return self._run(work())

    # Tools

    @property
    def tools(self) -> list[ServerTool]:
        """The tools of all servers."""
        return [tool for server in self.servers for tool in server.tools]

    def named(self, keys: Sequence[str]) -> list[NamedTool]:
        """The tools with these keys (`server/tool`), by the names that the model is told."""
        alone = len(self._configs) == 1
        named: dict[str, NamedTool] = {}
        for tool in self.tools:
            if tool.key in keys:
                name = model_name("" if alone else tool.server, tool.name)
                named.setdefault(name, NamedTool(name, tool))
        return list(named.values())

    @property
    def prompts(self) -> list[Offered]:
        """The prompts of all servers."""
        return [one for server in self.servers for one in server.prompts]

    @property
    def resources(self) -> list[Offered]:
        """The resources of all servers."""
        return [one for server in self.servers for one in server.resources]

    def call(
        self, tool: ServerTool, arguments: Mapping[str, Any], progress: Progress = lambda _: None
    ) -> Future[Result]:
        """Call a tool; cancelling the future cancels the call. It fails with a ToolsError."""
        return self._run(self._server(tool.server).call(tool, arguments, progress))

    def prompt(self, one: Offered, arguments: Mapping[str, str]) -> Future[str]:
        """The text of a prompt. Fails with a ToolsError."""
        return self._run(self._server(one.server).prompt(one.name, arguments))

    def resource(self, one: Offered) -> Future[str]:
        """The text of a resource. Fails with a ToolsError."""
        return self._run(self._server(one.server).resource(one.name))

    def _server(self, name: str) -> Server:
        found = next((server for server in self.servers if server.name == name), None)
        if found is None:
            raise ToolsError(_("there is no server {name}", name=name))
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None or self._closed:
            work.close()
            raise ToolsError(_("the servers have been stopped"))
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def model_name(server: str, tool: str) -> str:
    """A tool's name for the model, in the characters and the length that the name of a function may have.

    It follows from the two names alone, so that no server can take another's by what it lists or when it starts. Where
    another pair could lead to the same name, it ends with a digest of the pair.

    Args:
        server: The server's name; empty where there is only one.
        tool: The tool's name there.
    """
    whole = f"{server}_{tool}" if server else tool
    plain = _ODD.sub("_", whole)
    if plain == whole and "_" not in server and len(whole) <= MAX_NAME and not _DIGEST.search(whole):
        return whole
    digest = hashlib.sha256(json.dumps([server, tool]).encode()).hexdigest()[:DIGITS]
    return f"{plain[: MAX_NAME - DIGITS - 1]}_{digest}"
