"""The tools screen (^L): servers with their state and log, and the tools, prompts and resources that they offer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen

from app.language import _, ngettext
from app.printable import printable, printable_name
from app.tools import config
from app.tools.config import ToolsError
from app.tui.plain import Plain
from app.tui.screens.chat_dialogs import ImportDialog, PromptDialog
from app.tui.screens.dialogs import ConfirmDialog
from app.tui.session import Session
from app.tui.widgets.composer import Composer
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable

if TYPE_CHECKING:
    from app.tools.server import Offered, Server, ServerTool

NONE = _("There are no tool servers yet. Press I to import another program's mcp.json, or write {file} and press R.")
LONG_NAME = 40
"""Maximum characters of a tool's name in the table."""
SLIM_NAME = 18
"""Maximum characters of a name on a slim terminal."""
TOKENS_PER_CHARACTER = 0.3
"""Approximate number of tokens of a tool's description, which every prompt carries."""
STATES = {"off": _("○ off"), "starting": _("◌ starting"), "ready": _("● ready"), "failed": _("✕ failed")}


class ToolTable(PlainTable):
    """The table of servers and what they offer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "select_cursor", _("use"), tooltip=_("Let this chat use it, or not"), id="tools.use"),
    ]


class ToolsScreen(Screen[None]):
    """A table of servers, and under it what is known of the selected row."""

    AUTO_FOCUS = "ToolTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "a", "always", _("always"), tooltip=_("Run the tool unasked in every chat, or ask again"), id="tools.always"
        ),
        Binding(
            "r", "restart", _("restart"), tooltip=_("Read mcp.json again, and restart the servers"), id="tools.restart"
        ),
        Binding("s", "halt", _("stop"), tooltip=_("Stop the server under the cursor"), id="tools.stop"),
        Binding("i", "import", _("import"), tooltip=_("Add the servers of another program's file"), id="tools.import"),
        Binding("escape", "dismiss", _("back"), tooltip=_("Back to the chat"), id="tools.back"),
    ]

    def __init__(self, session: Session, composer: Composer) -> None:
        """Make the screen.

        Args:
            session: has the servers, and the chat that may use their tools.
            composer: receives prompts and resources.
        """
        super().__init__()
        self._session, self._composer = session, composer
        self._rows: dict[str, Server | ServerTool | Offered] = {}

    def compose(self) -> ComposeResult:
        """Header, note, table, details, keys."""
        yield HeaderBar()
        yield Plain("", id="tools-note")
        yield ToolTable(cursor_type="row")
        with VerticalScroll(id="tools-about", can_focus=False):
            yield Plain("")
        yield KeyLine()

    async def on_mount(self) -> None:
        """Start the servers if that has not happened, and fill the table."""
        self.show_tools()
        self.run_worker(self._session.tools.open(), group="tools", exit_on_error=False)

    def show_session(self) -> None:
        """Update the header."""
        if self.query(HeaderBar):
            self.query_one(HeaderBar).show(self._session)

    def show_tools(self) -> None:
        """Fill the table."""
        if not self.query(ToolTable):
            return
        self.show_session()
        tools = self._session.tools
        self._rows = {}
        for server in tools.box.servers if tools.box is not None else ():
            self._rows[f"server/{server.name}"] = server
            others: list[ServerTool | Offered] = [*server.tools, *server.prompts, *server.resources]
            for one in others:
                self._rows[f"{type(one).__name__}/{one.server}/{one.name}"] = one
        cells = {key: self._cells(one) for key, one in self._rows.items()}
        self.query_one(ToolTable).fill(
            cells, ["", _("name"), "", ""] if not self.has_class("-slim") else ["", _("name"), ""]
        )
        note = self.query_one("#tools-note", Plain)
        note.update(self._note())
        note.display = True
        self.tell_about()

    def _note(self) -> str:
        tools = self._session.tools
        if tools.problem:
            return tools.problem
        if not self._rows:
            return NONE.format(file=config.config_file())
        used, size = len(tools.named(self._session.conversation)), tools.size(self._session.conversation)
        if not used:
            return _("This chat uses no tools. Space lets it use the tool under the cursor, or all of a server.")
        about = round(size * TOKENS_PER_CHARACTER)
        return ngettext(
            "This chat may use {count} tool; its description takes about {about:,} tokens of its context.",
            "This chat may use {count} tools; their descriptions take about {about:,} tokens of its context.",
            used,
            about=about,
        )

    def _cells(self, one: Server | ServerTool | Offered) -> list[str]:
        cells = self._all_cells(one)
        if self.has_class("-slim"):
            cells[1] = cells[1] if len(cells[1]) <= SLIM_NAME else f"{cells[1][: SLIM_NAME - 1]}…"
            return cells[:3]
        return cells

    def _all_cells(self, one: Server | ServerTool | Offered) -> list[str]:
        from app.tools.server import Server, ServerTool

        if isinstance(one, Server):
            state = _("off (disabled)") if one.config.disabled else STATES[one.state]
            count = ngettext("{count} tool", "{count} tools", len(one.tools)) if one.state == "ready" else ""
            return [" ", printable_name(one.name), state, count or printable_name(one.config.shown)]
        if not isinstance(one, ServerTool):
            kind = _("resource") if "://" in one.name else _("prompt")
            return [" ", f"  {printable(one.title)[:60]}", kind, _("Enter puts it into the message")]
        tools = self._session.tools
        on = one.key in tools.keys(self._session.conversation)
        always = one.fingerprint in tools.permissions.always
        here = tools.permissions.allows(one.fingerprint, self._session.conversation.id)
        asks = _("runs unasked") if always else _("unasked in this chat") if here else _("asks first")
        name = one.name if len(one.name) <= LONG_NAME else f"{one.name[: LONG_NAME - 1]}…"
        return ["[x]" if on else "[ ]", f"  {name}", _("reads") if one.reads else _("may write"), asks]

    @property
    def _chosen(self) -> Server | ServerTool | Offered | None:
        return self._rows.get(self.query_one(ToolTable).under or "")

    @on(PlainTable.RowHighlighted)
    def tell_about(self) -> None:
        """Show what is known of the row under the cursor."""
        from app.tools.server import Server, ServerTool

        one, text = self._chosen, ""
        if isinstance(one, Server):
            parts = [one.problem, *one.notes, f"{_('log:')}\n{one.log}" if one.log else _("Its log is empty.")]
            text = "\n".join(part for part in parts if part)
        elif isinstance(one, ServerTool):
            schema = (
                self._session.tools.box.secrets.hide(json.dumps(one.schema, indent=2, ensure_ascii=False))
                if self._session.tools.box
                else ""
            )
            name = f"{one.name}\n\n" if len(one.name) > LONG_NAME else ""
            text = f"{name}{one.description or _('It has no description.')}\n\n{schema}"
        elif one is not None:
            text = one.title
        self.query_one("#tools-about", VerticalScroll).query_one(Plain).update(printable(text)[:20_000])

    @on(PlainTable.RowSelected)
    def use(self) -> None:
        """Let the chat use a tool or all of a server's tools, or no longer; or insert a prompt or resource."""
        from app.tools.server import Offered, Server, ServerTool

        one, tools = self._chosen, self._session.tools
        if isinstance(one, Offered):
            self._insert(one)
            return
        keys = (
            [tool.key for tool in one.tools]
            if isinstance(one, Server)
            else [one.key]
            if isinstance(one, ServerTool)
            else []
        )
        if keys:
            now = tools.keys(self._session.conversation)
            self._try(lambda: tools.switch(self._session.conversation, keys, on=not all(key in now for key in keys)))

    def _try(self, change: Callable[[], object]) -> None:
        """Change permissions, and show the result or the reason why not."""
        try:
            change()
        except ToolsError as error:
            self.notify(str(error), severity="error")
        self.show_tools()

    def action_always(self) -> None:
        """Run the tool under the cursor unasked in every chat, or ask again. One that may write is asked about here."""
        from app.tools.server import ServerTool

        one, permissions, chat = self._chosen, self._session.tools.permissions, self._session.conversation.id
        if not isinstance(one, ServerTool):
            return
        tool = one
        if permissions.allows(tool.fingerprint, chat):
            self._try(lambda: permissions.revoke(tool.fingerprint, chat))
        elif tool.reads:
            self._try(lambda: permissions.decide(tool.fingerprint, tool.key, chat, "always"))
        else:

            def decided(confirmed: bool | None) -> None:
                if confirmed:
                    self._try(lambda: permissions.decide(tool.fingerprint, tool.key, chat, "always"))

            told = _(
                "Let models call {name} of {server} without asking you, in every chat? It may change something.",
                name=tool.name,
                server=printable_name(tool.server),
            )
            self.app.push_screen(ConfirmDialog(told, _("Always")), decided)

    def action_restart(self) -> None:
        """Read mcp.json again, and start its servers."""
        self.run_worker(self._session.tools.reload(), group="tools", exclusive=True, exit_on_error=False)

    def action_halt(self) -> None:
        """Stop the server under the cursor."""
        from app.tools.server import Server

        one, box = self._chosen, self._session.tools.box
        if isinstance(one, Server) and box is not None:
            self._wait(asyncio.wrap_future(box.stop(one.name)))

    def action_import(self) -> None:
        """Ask for another program's file, and add its servers."""

        def take(path: Path | None) -> None:
            if path is None:
                return
            try:
                names = config.import_from(path)
            except ToolsError as error:
                self.notify(str(error), severity="error")
                return
            self.notify(_("Imported {names}.", names=", ".join(map(printable_name, names)) or _("no servers")))
            self.action_restart()

        self.app.push_screen(ImportDialog(), take)

    def _insert(self, one: Offered) -> None:
        """Put a prompt or a resource into the message that is being written."""
        box = self._session.tools.box
        if box is None:
            return
        if "://" in one.name:
            self._wait(self._inserted(box.resource(one), one.title))
        elif not one.arguments:
            self._wait(self._inserted(box.prompt(one, {})))
        else:

            def take(arguments: Mapping[str, str] | None) -> None:
                if arguments is not None:
                    self._wait(self._inserted(box.prompt(one, arguments)))

            self.app.push_screen(PromptDialog(one), take)

    async def _inserted(self, found: Future[str], name: str = "") -> None:
        text = await asyncio.wrap_future(found)
        if name:
            self._composer.attach(printable_name(name)[:60], text)
        else:
            self._composer.put(f"{self._composer.value}{text}")
        self.dismiss()

    def _wait(self, work: Awaitable[Any]) -> None:
        async def wait() -> None:
            try:
                await work
            except ToolsError as error:
                self.notify(str(error), severity="error")

        self.run_worker(wait(), group="tools", exit_on_error=False)

    def on_resize(self) -> None:
        """Show the columns that fit."""
        self.call_after_refresh(self.show_tools)

    async def action_dismiss(self, result: None = None) -> None:
        """Back to the chat."""
        self.dismiss(result)
