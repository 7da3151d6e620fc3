"""Server: the life of one MCP server, from its start to its end, and the requests in between.

A task of its own holds the connection. Everything that a server does wrong ends up in `state` and one sentence; nothing
that it sends is trusted, and no request waits longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from app.language import _, number
from app.printable import printable_name
from app.tools.config import Secrets, ServerConfig, ToolsError
from app.tools.contents import MAX_DESCRIPTION, clean, mended_schema, resource_text, text_of
from app.tools.permissions import fingerprint
from runtime.system.foreign import read_json

if TYPE_CHECKING:
    from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher

    from app.tools.pipe import Log

State = Literal["off", "starting", "ready", "failed"]
R = TypeVar("R")
START_S = 60.0
"""Longest start: npx and uvx may download the server first."""
LIST_S = 15.0
"""Longest wait for a list."""
CALL_S = 120.0
"""Longest silence in a call; progress begins it anew."""
LONGEST_CALL_S = 1800.0
MAX_TOOLS, MAX_OTHERS, MAX_PAGES = 128, 500, 20
"""Most tools, and most prompts and resources, of a server; most pages of a list."""
MAX_SCHEMA = 2**16
"""Most characters of a tool's schema."""
MAX_NAME = 200
"""Most characters of a tool's name."""
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it would tell of every flaw, addresses included
Progress = Callable[[str], object]
"""Receives words about a call that is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool of a server."""

    server: str
    """The server's name."""
    name: str
    """Its name there."""
    description: str
    """Its description, made safe to show."""
    schema: Mapping[str, Any]
    """JSON schema of its arguments."""
    reads: bool
    """Whether the server says that it changes nothing."""
    fingerprint: str
    """Of its definition, see `app.tools.permissions`."""

    @property
    def key(self) -> str:
        """Its name among all tools."""
        return f"{self.server}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A prompt or a resource of a server."""

    server: str
    name: str
    """A prompt's name, or a resource's address."""
    title: str
    """For people, with a description if there is one."""
    arguments: tuple[tuple[str, bool], ...] = ()
    """Names of a prompt's arguments, and whether they are required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a call."""

    text: str
    """For the model."""
    failed: bool = False
    """Whether the tool reported an error."""


class Server:
    """One server.

    Args:
        config: Its entry in mcp.json.
        secrets: What is removed from texts.
        changed: Called whenever the state or a list changes.
    """

    def __init__(self, config: ServerConfig, secrets: Secrets, changed: Callable[[], object]) -> None:
        self.config = config
        self.state: State = "failed" if config.problem else "off"
        self.problem = secrets.hide_all(config.problem)
        """Why it failed, in one sentence."""
        self.tools: Sequence[ServerTool] = ()
        self.prompts: Sequence[Offered] = ()
        self.resources: Sequence[Offered] = ()
        self.notes: tuple[str, ...] = ()
        """What is odd about its lists, a sentence each."""
        self._secrets, self._changed = secrets, changed
        self._log: Log | None = None
        self._wire: JSONRPCDispatcher[Any] | None = None
        self._told: Mapping[str, Any] = {}  # what it said of itself in the handshake
        self._headers: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stale = asyncio.Event()  # whether it said that a list changed
        self._ended: Callable[[], bool] = lambda: False

    @property
    def name(self) -> str:
        """Its name."""
        return self.config.name

    @property
    def log(self) -> str:
        """The end of what it said on standard error."""
        return "" if self._log is None else self._log.text

    def start(self) -> None:
        """Start it in the background, unless it runs, is disabled, or has an invalid entry."""
        if self.state in ("off", "failed") and not self.config.disabled and not self.config.problem:
            self._stop, self._stale = asyncio.Event(), asyncio.Event()
            self._set("starting")
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End it, and wait until nothing of it runs any more."""
        self._stop.set()
        if self._task is not None:
            task, self._task = self._task, None
            if self.state == "starting":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def call(self, tool: ServerTool, arguments: Mapping[str, Any], tell: Progress) -> Result:
        """Call a tool as it was when the caller saw it. Cancelling this tells the server so.

        Raises:
            ToolsError: the server is gone, has changed the tool, does not answer in time, or answers with nonsense.
        """
        loop = asyncio.get_running_loop()
        heard = loop.time()

        async def report(progress: float, total: float | None, message: str | None) -> None:
            nonlocal heard
            heard = loop.time()
            share = _("{progress:g} of {total:g}", progress=progress, total=total) if total else number(progress, "g")
            tell(self._shown(f"{share} {message or ''}".strip(), 200))

        wire = self._wire_or_raise()
        if tool not in self.tools:
            raise ToolsError(
                _(
                    "{name} has changed or withdrawn {tool}; it was not called",
                    name=self.name,
                    tool=printable_name(tool.name),
                )
            )
        try:
            params = {"name": tool.name, "arguments": read_json(json.dumps(dict(arguments)))}
        except (ValueError, RecursionError) as error:
            raise ToolsError(
                _("the arguments for {name} can't be sent: {error}", name=printable_name(tool.name), error=error)
            ) from None
        what = _("the call of {name}", name=printable_name(tool.name))
        work = asyncio.create_task(
            wire.send_raw_request(
                "tools/call", params, {"timeout": LONGEST_CALL_S, "on_progress": report, "headers": self._headers}
            )
        )
        try:
            while not work.done():
                await asyncio.wait([work], timeout=max(0.05, heard + CALL_S - loop.time()))
                if not work.done() and loop.time() - heard >= CALL_S:
                    raise ToolsError(
                        _(
                            "{name} was silent for {most:g} s in {what}; it was stopped",
                            name=self.name,
                            most=CALL_S,
                            what=what,
                        )
                    )
            answer = await self._answer(work, what)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=2)
        structured = answer.get("structuredContent")
        given = answer.get("content", [] if structured is not None else None)
        contents = self._items([{"type": "text", "text": given}] if isinstance(given, str) else given, what)
        text = self._secrets.hide(text_of(contents, structured))
        return Result(text=clean(text) or "(empty)", failed=bool(answer.get("isError")))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> str:
        """The text of a prompt.

        Raises:
            ToolsError: see `call`.
        """
        what = _("the prompt {name}", name=printable_name(name))
        found = await self._ask("prompts/get", {"name": name, "arguments": dict(arguments)}, what, LIST_S)
        parts = [one.get("content") for one in self._items(found.get("messages"), what) if isinstance(one, dict)]
        return clean(self._secrets.hide("\n\n".join(text_of(one if isinstance(one, list) else [one]) for one in parts)))

    async def resource(self, address: str) -> str:
        """The text of a resource.

        Raises:
            ToolsError: see `call`.
        """
        what = _("the resource {reason}", reason=self._shown(address, 200))
        found = await self._ask("resources/read", {"uri": address}, what, CALL_S)
        return clean(self._secrets.hide(resource_text(self._items(found.get("contents"), what))))

    def _wire_or_raise(self) -> JSONRPCDispatcher[Any]:
        if self._wire is None:
            raise ToolsError(self.problem or _("{name} is not running", name=self.name))
        return self._wire

    async def _ask(self, method: str, params: Mapping[str, Any] | None, what: str, most_s: float) -> dict[str, Any]:
        """Send a request and wait for its result.

        Raises:
            ToolsError: see `call`.
        """
        begins = method == "initialize"  # a handshake can't be cancelled
        request = self._wire_or_raise().send_raw_request(
            method, params, {"headers": self._headers, "cancel_on_abandon": not begins}
        )
        return await self._answer(asyncio.wait_for(request, most_s), what)

    async def _answer(self, request: Awaitable[R], what: str) -> R:
        """Wait for an answer.

        Raises:
            ToolsError: in one sentence, what the server did instead.
        """
        import mcp_types as types
        from mcp import MCPError

        try:
            return await request
        except TimeoutError:
            raise ToolsError(_("{name} did not answer {what} in time", name=self.name, what=what)) from None
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise ToolsError(
                    _(
                        "{name} ended during {what}{last}",
                        name=self.name,
                        what=what,
                        last=self._last_words(),
                    )
                ) from None
            if error.code == types.PARSE_ERROR:
                words = str(error).removeprefix("Failed to parse JSON response: ")
                shown = _("it is not a message") if "validation error" in words else self._shown(words, 200)
                raise ToolsError(
                    _(
                        "{name} answered {what} with something unreadable: {shown}",
                        name=self.name,
                        what=what,
                        shown=shown,
                    )
                ) from None
            raise ToolsError(
                _("{name} refused {what}: {reason}", name=self.name, what=what, reason=self._shown(str(error)))
            ) from None
        except (RuntimeError, OSError, ValueError, RecursionError) as error:
            raise ToolsError(
                _("{what} of {name} failed: {reason}", what=what, name=self.name, reason=self._shown(str(error)))
            ) from None

    def _items(self, found: Any, what: str) -> list[Any]:
        """A list of an answer; some languages write an empty one as an object."""
        if not isinstance(found, list) and found != {}:
            raise ToolsError(_("{name} answered {what} in a form that MCP does not define", name=self.name, what=what))
        return list(found)

    def _shown(self, text: str, most: int = 300) -> str:
        return " ".join(clean(self._secrets.hide_all(text), 4 * most).split())[:most]

    def _last_words(self) -> str:
        last = self._log.last if self._log is not None else ""
        return _("; its last output: {reason}", reason=self._shown(last, 200)) if last else ""

    def _set(self, state: State, problem: str = "") -> None:
        self.state, self.problem = state, problem
        self._changed()

    async def _run(self) -> None:
        """Connect, stay connected until the end, and say why it ended."""
        from app.tools.pipe import Log

        self._log = log = Log(self._secrets.hide_all)
        problem = ""
        try:
            async with self._connected(log):
                await self._list()
                self._set("ready")
                await self._live()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
        except BaseException as error:  # noqa: BLE001 -- libraries wrap what a server did in groups of errors
            problem = self._why(_inner(error))
        finally:
            self._wire = None
            self.tools = self.prompts = self.resources = ()
        stopped = self._stop.is_set()
        self._set(
            "off" if stopped else "failed",
            "" if stopped else problem or _("{name} ended{last}", name=self.name, last=self._last_words()),
        )

    def _why(self, error: BaseException) -> str:
        """Why the server can't be used, in one sentence."""
        if isinstance(error, ToolsError):
            return str(error)
        if isinstance(error, FileNotFoundError):
            return _("{name} can't be started: there is no program {shown}", name=self.name, shown=self.config.shown)
        if isinstance(error, TimeoutError):
            return _(
                "{name} did not start within {most:g} s{last}",
                name=self.name,
                most=START_S,
                last=self._last_words(),
            )
        return _(
            "{name} failed: {reason}{last}",
            name=self.name,
            reason=self._shown(str(error) or type(error).__name__),
            last=self._last_words(),
        )

    async def _live(self) -> None:
        """Wait until it is to end, ends, or changes its lists."""
        while not self._stop.is_set():
            waits = [asyncio.create_task(one.wait()) for one in (self._stop, self._stale)]
            await asyncio.wait(waits, timeout=2.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._stale.is_set():
                self._stale.clear()
                await self._list()
                self._changed()
                with contextlib.suppress(TimeoutError):  # a server may change its lists all the time
                    await asyncio.wait_for(self._stop.wait(), 1.0)
            if self._ended():
                raise ToolsError(_("{name} ended{last}", name=self.name, last=self._last_words()))

    @asynccontextmanager
    async def _connected(self, log: Log) -> AsyncIterator[None]:
        """A connection with the server after its handshake."""
        import anyio
        import mcp_types as types
        from mcp import MCPError
        from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
        from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION

        from runtime import program_version

        async def asked(_context: object, method: str, _params: object) -> dict[str, Any]:
            if method == "ping":
                return {}
            raise MCPError(code=types.METHOD_NOT_FOUND, message="this client has no such method")

        async def heard(_context: object, method: str, params: Mapping[str, Any] | None) -> None:
            if method.endswith("/list_changed"):
                self._stale.set()
            elif method == "notifications/message":
                log.add(f"{(params or {}).get('level')}: {str((params or {}).get('data'))[:500]}")

        client = {"name": "lowbit-chat", "version": program_version()}
        hello = {"protocolVersion": LATEST_HANDSHAKE_VERSION, "capabilities": {}, "clientInfo": client}
        async with self._transport(log) as (read, write), anyio.create_task_group() as group:
            self._ended = lambda: _closed(read)
            self._wire = wire = JSONRPCDispatcher(read, write)
            self._headers = {}
            await group.start(wire.run, asked, heard)
            try:
                async with asyncio.timeout(START_S):
                    self._told = await self._ask("initialize", hello, _("the handshake"), 2 * START_S)
                    version = self._told.get("protocolVersion")
                    if version not in HANDSHAKE_PROTOCOL_VERSIONS:
                        shown = self._shown(str(version), 40)
                        raise ToolsError(
                            _(
                                "{name} speaks version {shown} of MCP, which this program does not",
                                name=self.name,
                                shown=shown,
                            )
                        )
                    self._headers = {MCP_PROTOCOL_VERSION_HEADER: version}
                    await wire.notify("notifications/initialized", None, {"headers": self._headers})
                yield
            finally:
                group.cancel_scope.cancel()

    @asynccontextmanager
    async def _transport(self, log: Log) -> AsyncIterator[Any]:
        if not self.config.url:
            from app.tools.pipe import pipe

            async with pipe(self.config, log) as streams:
                yield streams
            return
        from app.tools.web import web

        async with web(self.config, CALL_S) as streams:
            yield streams

    # Lists

    async def _list(self) -> None:
        """Ask for tools, prompts and resources."""
        can = self._told.get("capabilities")
        notes: list[str] = []
        self.tools = self._checked_tools(await self._pages("tools", MAX_TOOLS, notes), notes)
        for kind in ("prompts", "resources"):
            if not isinstance(can, dict) or can.get(kind) in (None, False):
                continue
            try:
                found = await self._pages(kind, MAX_OTHERS, notes)
            except ToolsError as error:  # its tools work
                notes.append(str(error))
                continue
            offered = [self._offered(one, "uri" if kind == "resources" else "name") for one in found]
            if None in offered:
                notes.append(
                    _("{count} of its {kind} are left out: they have no name", count=offered.count(None), kind=kind)
                )
            setattr(self, kind, [one for one in offered if one is not None])
        self.notes = tuple(notes)

    async def _pages(self, kind: str, most: int, notes: list[str]) -> list[Any]:
        """All entries of a list."""
        found: list[Any] = []
        cursor: Any = None
        for _page in range(MAX_PAGES):
            what = _("the list of {kind}", kind=kind)
            page = await self._ask(f"{kind}/list", {"cursor": cursor} if cursor else None, what, LIST_S)
            found += self._items(page.get(kind), what)
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor or len(found) > most:
                break
        if len(found) > most or (isinstance(cursor, str) and cursor):
            notes.append(_("it lists more than {most} {kind}; the first {most} are used", most=most, kind=kind))
        return found[:most]

    def _offered(self, entry: Any, key: str) -> Offered | None:
        """A prompt or a resource; None if it has no name."""
        name = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            return None
        title = next((one for one in (entry.get("title"), entry.get("name")) if isinstance(one, str) and one), name)
        more = entry.get("description") if key == "name" else name
        arguments = entry.get("arguments")
        return Offered(
            server=self.name,
            name=name,
            title=self._shown(f"{title} · {more}" if isinstance(more, str) and more not in ("", title) else title, 200),
            arguments=tuple(
                (one["name"][:80], one.get("required") is True)
                for one in (arguments if isinstance(arguments, list) else [])[:20]
                if isinstance(one, dict) and isinstance(one.get("name"), str)
            ),
        )

    def _checked_tools(self, found: Sequence[Any], notes: list[str]) -> list[ServerTool]:
        """The tools whose entries can be used; one that can't costs no other."""
        kept: dict[str, ServerTool] = {}
        for place, entry in enumerate(found, 1):
            try:
                tool = self._tool(entry, place)
            except ToolsError as error:
                notes.append(str(error))
                continue
            if tool.name in kept:
                notes.append(_("the tool {name} is listed twice; the first is used", name=tool.name))
            kept.setdefault(tool.name, tool)
        return list(kept.values())

    def _tool(self, entry: Any, number: int) -> ServerTool:
        """A tool, its schema mended where it is clear what is meant.

        Raises:
            ToolsError: it can't be used.
        """
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ToolsError(_("tool number {number} in the list is left out: it has no name", number=number))
        shown = self._shown(printable_name(name), 60)
        if not name.isascii() or not name.isprintable() or name != " ".join(name.split()):
            raise ToolsError(
                _("the tool {shown!r} is left out: its name may contain only visible ASCII characters", shown=shown)
            )
        if len(name) > MAX_NAME:
            raise ToolsError(
                _(
                    "the tool {shown!r} is left out: its name has more than {most} characters",
                    shown=shown,
                    most=MAX_NAME,
                )
            )
        try:
            schema = mended_schema(entry.get("inputSchema"), self._secrets.hide)
        except ValueError as error:
            raise ToolsError(_("the tool {shown!r} is left out: {error}", shown=shown, error=error)) from None
        if len(str(schema)) > MAX_SCHEMA:
            raise ToolsError(
                _(
                    "the tool {shown!r} is left out: its schema has more than {most:,} characters",
                    shown=shown,
                    most=MAX_SCHEMA,
                )
            )
        said, hints = entry.get("description"), entry.get("annotations")
        definition = {key: value for key, value in entry.items() if key not in ("_meta", "icons")}
        return ServerTool(
            server=self.name,
            name=name,
            description=clean(self._secrets.hide(said if isinstance(said, str) else ""), MAX_DESCRIPTION),
            schema=schema,
            reads=isinstance(hints, dict) and hints.get("readOnlyHint") is True,
            fingerprint=fingerprint(self.config.identity, definition),
        )


def _closed(stream: Any) -> bool:
    """Whether a stream of messages has no writer left."""
    with contextlib.suppress(AttributeError):
        return int(stream.statistics().open_send_streams) == 0
    return False


def _inner(error: BaseException) -> BaseException:
    """The innermost error of a group."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
