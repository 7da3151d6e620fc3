"""Server: the life of one MCP server, from its start to its end, and the requests in between.

A task of its own holds the connection. Everything that a server does wrong ends up in `state` and one sentence; nothing
that it sends is trusted, and no request waits longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from app.printable import printable_name
from app.tools.config import ServerConfig, ToolsError
from app.tools.contents import MAX_DESCRIPTION, clean, resource_text, text_of
from app.tools.permissions import fingerprint

if TYPE_CHECKING:
    from mcp.client.session import ClientSession

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
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
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
    print: str
    """Its fingerprint, see `app.tools.permissions`."""

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
        hide: Removes secrets from texts.
        changed: Called whenever the state or a list changes.
    """

    def __init__(self, config: ServerConfig, hide: Callable[[str], str], changed: Callable[[], object]) -> None:
        self.config = config
        self.state: State = "failed" if config.problem else "off"
        self.problem = hide(config.problem)
        """Why it failed, in one sentence."""
        self.tools: Sequence[ServerTool] = ()
        self.prompts: Sequence[Offered] = ()
        self.resources: Sequence[Offered] = ()
        self.notes: tuple[str, ...] = ()
        """What is odd about its lists, a sentence each."""
        self._hide, self._changed = hide, changed
        self._log: Log | None = None
        self._session: ClientSession | None = None
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

    async def call(self, tool: str, arguments: Mapping[str, Any], tell: Progress) -> Result:
        """Call a tool. Cancelling this tells the server so.

        Raises:
            ToolsError: the server is gone, does not answer in time, or answers with nonsense.
        """
        import mcp_types as types

        loop = asyncio.get_running_loop()
        heard = loop.time()

        async def report(progress: float, total: float | None, message: str | None) -> None:
            nonlocal heard
            heard = loop.time()
            share = f"{progress:g} of {total:g}" if total else f"{progress:g}"
            tell(self._shown(f"{share} {message or ''}".strip(), 200))

        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        work = asyncio.create_task(
            self._session_or_raise().send_request(
                request, types.CallToolResult, request_read_timeout_seconds=LONGEST_CALL_S, progress_callback=report
            )
        )
        try:
            while not work.done():
                await asyncio.wait([work], timeout=max(0.05, heard + CALL_S - loop.time()))
                if not work.done() and loop.time() - heard >= CALL_S:
                    raise ToolsError(f"{self.name} said nothing for {CALL_S:g} s in the call of {tool}; it was stopped")
            answer = await self._answer(work, f"the call of {tool}")
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work], timeout=2)
        text = self._hide(text_of(answer.content, answer.structured_content))
        return Result(text=clean(text) or "(empty)", failed=bool(answer.is_error))

    async def prompt(self, name: str, arguments: Mapping[str, str]) -> str:
        """The text of a prompt.

        Raises:
            ToolsError: see `call`.
        """
        request = self._session_or_raise().get_prompt(name, dict(arguments))
        found = await self._answer(asyncio.wait_for(request, LIST_S), f"the prompt {name}")
        return clean(self._hide("\n\n".join(text_of([message.content]) for message in found.messages)))

    async def resource(self, address: str) -> str:
        """The text of a resource.

        Raises:
            ToolsError: see `call`.
        """
        request = self._session_or_raise().read_resource(address)
        found = await self._answer(asyncio.wait_for(request, CALL_S), f"the resource {address}")
        return clean(self._hide(resource_text(found.contents)))

    def _session_or_raise(self) -> ClientSession:
        if self._session is None:
            raise ToolsError(self.problem or f"{self.name} is not running")
        return self._session

    async def _answer(self, request: Awaitable[R], what: str) -> R:
        """Wait for an answer.

        Raises:
            ToolsError: in one sentence, what the server did instead.
        """
        import mcp_types as types
        from mcp import MCPError
        from pydantic import ValidationError

        try:
            return await request
        except TimeoutError:
            raise ToolsError(f"{self.name} did not answer {what} in time") from None
        except ValidationError:
            raise ToolsError(f"{self.name} answered {what} in a form that MCP does not have") from None
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise ToolsError(f"{self.name} ended during {what}{self._last_words()}") from None
            raise ToolsError(f"{self.name} refused {what}: {self._shown(str(error))}") from None
        except (RuntimeError, OSError, ValueError, RecursionError) as error:
            raise ToolsError(f"{what} of {self.name} failed: {self._shown(str(error))}") from None

    def _shown(self, text: str, most: int = 300) -> str:
        return " ".join(clean(self._hide(text), 4 * most).split())[:most]

    def _last_words(self) -> str:
        last = self._log.last if self._log is not None else ""
        return f"; its last words: {self._shown(last, 200)}" if last else ""

    def _set(self, state: State, problem: str = "") -> None:
        self.state, self.problem = state, problem
        self._changed()

    async def _run(self) -> None:
        """Connect, stay connected until the end, and say why it ended."""
        from app.tools.pipe import Log

        self._log = log = Log(self._hide)
        problem = ""
        try:
            async with self._connected(log) as session:
                self._session = session
                await self._list()
                self._set("ready")
                await self._live()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
        except BaseException as error:  # noqa: BLE001 -- libraries wrap what a server did in groups of errors
            problem = self._why(_inner(error))
        finally:
            self._session = None
            self.tools = self.prompts = self.resources = ()
        stopped = self._stop.is_set()
        self._set(
            "off" if stopped else "failed", "" if stopped else problem or f"{self.name} ended{self._last_words()}"
        )

    def _why(self, error: BaseException) -> str:
        """Why the server can't be used, in one sentence."""
        if isinstance(error, ToolsError):
            return str(error)
        if isinstance(error, FileNotFoundError):
            return f"{self.name} can't be started: there is no program {self.config.shown}"
        if isinstance(error, TimeoutError):
            return f"{self.name} did not start within {START_S:g} s{self._last_words()}"
        return f"{self.name} failed: {self._shown(str(error) or type(error).__name__)}{self._last_words()}"

    async def _live(self) -> None:
        """Wait until it is to end, ends, or changes its lists."""
        session = self._session
        assert session is not None
        while not self._stop.is_set():
            waits = [asyncio.create_task(one.wait()) for one in (self._stop, self._stale)]
            await asyncio.wait(waits, timeout=2.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._stale.is_set():
                self._stale.clear()
                await self._list()
                self._changed()
                await asyncio.sleep(1.0)  # a server may change its lists all the time
            if self._ended():
                raise ToolsError(f"{self.name} ended{self._last_words()}")

    @asynccontextmanager
    async def _connected(self, log: Log) -> AsyncIterator[ClientSession]:
        """A session with the server after its handshake."""
        import mcp_types as types
        from mcp.client.session import ClientSession

        from runtime import program_version

        async def heard(message: Any) -> None:
            if type(message).__name__.endswith("ListChangedNotification"):
                self._stale.set()

        async def logged(params: Any) -> None:
            log.add(f"{params.level}: {str(params.data)[:500]}")

        client = types.Implementation(name="lowbit-chat", version=program_version())
        async with self._transport(log) as (read, write):
            self._ended = lambda: _closed(read)
            session = ClientSession(read, write, logging_callback=logged, message_handler=heard, client_info=client)
            async with session:
                async with asyncio.timeout(START_S):
                    await self._answer(session.initialize(), "the handshake")
                yield session

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
        session = self._session
        assert session is not None
        can = session.server_capabilities
        self.notes = ()
        notes: list[str] = []
        self.tools = self._checked_tools(await self._pages(session.list_tools, "tools", MAX_TOOLS, notes), notes)
        if can is not None and can.prompts is not None:
            self.prompts = [
                Offered(
                    server=self.name,
                    name=one.name,
                    title=self._title(one.title or one.name, one.description),
                    arguments=tuple((str(a.name)[:80], bool(a.required)) for a in (one.arguments or ())[:20]),
                )
                for one in await self._pages(session.list_prompts, "prompts", MAX_OTHERS, notes)
            ]
        if can is not None and can.resources is not None:
            self.resources = [
                Offered(server=self.name, name=one.uri, title=self._title(one.title or one.name, one.uri))
                for one in await self._pages(session.list_resources, "resources", MAX_OTHERS, notes)
            ]
        self.notes = tuple(notes)

    async def _pages(self, ask: Callable[..., Awaitable[Any]], kind: str, most: int, notes: list[str]) -> list[Any]:
        """All entries of a list."""
        import mcp_types as types

        found: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._answer(asyncio.wait_for(ask(params=params), LIST_S), f"the list of {kind}")
            found += getattr(page, kind)
            cursor = page.next_cursor
            if not cursor or len(found) > most:
                break
        if len(found) > most or cursor:
            notes.append(f"it lists more than {most} {kind}; the first {most} are used")
        return found[:most]

    def _title(self, name: str, more: str | None) -> str:
        return self._shown(f"{name} · {more}" if more and more != name else name, 200)

    def _checked_tools(self, found: Sequence[Any], notes: list[str]) -> list[ServerTool]:
        """The tools whose entries can be used."""
        kept: dict[str, ServerTool] = {}
        for tool in found:
            problem = self._tool_problem(tool, kept)
            if problem:
                notes.append(problem)
                continue
            definition = {"description": tool.description, "schema": tool.input_schema}
            kept[tool.name] = ServerTool(
                server=self.name,
                name=tool.name,
                description=self._hide(clean(tool.description or "", MAX_DESCRIPTION)),
                schema=tool.input_schema,
                reads=bool(tool.annotations is not None and tool.annotations.read_only_hint),
                print=fingerprint(f"{self.config.command} {self.config.args} {self.config.url}", tool.name, definition),
            )
        return list(kept.values())

    def _tool_problem(self, tool: Any, kept: Mapping[str, ServerTool]) -> str:
        name = printable_name(tool.name)[:60]
        if not 0 < len(tool.name) <= 64 or not set(tool.name) <= _NAME:
            return f"the tool {name!r} is left out: its name may only have letters, digits and . _ -"
        if tool.name in kept:
            return f"the tool {name} is listed twice; the first is used"
        try:
            size = len(str(tool.input_schema))
        except RecursionError:
            size = MAX_SCHEMA + 1
        return (
            f"the tool {name} is left out: its schema has more than {MAX_SCHEMA:,} characters"
            if size > MAX_SCHEMA
            else ""
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
