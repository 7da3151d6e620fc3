"""The application: connects screens, keys and session, and starts the runtime after the first paint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import on
from textual._context import active_message_pump
from textual.app import App, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.dom import NoScreen
from textual.driver import Driver
from textual.screen import Screen
from textual.widget import MountError, Widget
from textual.worker import Worker, WorkerState

from app import paths
from app.conversation import Conversation
from app.errors import CommandError
from app.language import _
from app.settings import Settings
from app.tui import terminal as clipboard
from app.tui import themes
from app.tui.background_history import BackgroundHistory
from app.tui.keys import KEYS
from app.tui.messages import (
    CallAsked,
    ChatAsked,
    ChatEnded,
    JobChanged,
    LeftOut,
    LoadAsked,
    NotKept,
    NotSearched,
    StatusChanged,
    ToolsChanged,
)
from app.tui.palette import Finder, commands
from app.tui.preload import preload
from app.tui.runtime import SupervisorLike
from app.tui.screens.chat import ChatScreen
from app.tui.session import Session
from app.tui.terminal import (
    NO_PROGRESS,
    LongWork,
    SuspendDetector,
    ensure_size,
    marks_progress,
    notice,
    progress_mark,
    surviving,
    terminal_is_gone,
    window_title,
)
from app.tui.work_app import LOCAL_ACTIONS, WorkApp

CHECK_INTERVAL_S = 5.0
WATCH_INTERVAL_S = 0.5
REMOTE_CHECKS = 12
"""A remote server is checked only once per this many intervals."""
LATER_CSS = Path(__file__).with_name("screens.tcss")
"""Styles that the first paint does not need."""
QUIT_AGAIN_S = 2.0
CHAT_ACTIONS = frozenset(
    {
        "new_chat", "regenerate", "continue", "copy_answer", "stop", "edit", "attach", "chat_settings", "presets",
        "inspect", "editor",
    }
)  # fmt: skip
"""Actions that only the chat screen has."""


def _own_supervisor(settings: Settings) -> SupervisorLike:
    from app.supervisor import supervisor_of

    return supervisor_of(paths.home(), settings)


class ChatApp(WorkApp):
    """The terminal UI."""

    TITLE = "lowbit-chat"
    CSS_PATH = "chat.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = {Finder}  # noqa: RUF012  declared so by Textual
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (90, "-wide")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [*KEYS]

    def __init__(
        self,
        settings: Settings,
        *,
        supervisor: Callable[[], SupervisorLike] | None = None,
        history: Path | None = None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """Make the application.

        Args:
            settings: the initial settings.
            supervisor: makes the runtime's supervisor; called after the first paint. This program's own by default.
            history: file in which chats are saved; without one they end with the program.
            now: returns the current time, for messages.
        """
        super().__init__()
        for theme in themes.OWN:
            self.register_theme(theme)
        self.apply_theme(settings)
        self._applied_colors = self.get_css_variables()
        self.stylesheet.set_variables(self._applied_colors)
        conversation = Conversation(now) if now else Conversation()
        chats = BackgroundHistory(history, self._cannot_keep) if history else None
        own = supervisor or (lambda: _own_supervisor(settings))
        self.session = Session(
            lambda: self._supervisor(own), settings, self.post_message, conversation=conversation, history=chats
        )
        self._interrupted = -QUIT_AGAIN_S
        self._suspend = SuspendDetector(CHECK_INTERVAL_S)
        self._long = LongWork()
        self._checks = 0
        self._titled = ""
        """The title of the terminal's window."""
        self._marked = NO_PROGRESS
        """The mark of progress at the terminal's window."""

    def _supervisor(self, own: Callable[[], SupervisorLike]) -> SupervisorLike:
        """The supervisor of our own runtime, or of the remote server in the settings."""
        settings = self.session.settings
        if settings.endpoint is None:
            return own()
        from app.remote import RemoteSupervisor

        return RemoteSupervisor(settings.endpoint, settings.endpoint_token)

    def _cannot_keep(self, reason: str) -> None:
        """Report a failure to save; may be called from any thread."""
        self.post_message(NotKept(reason))

    @on(NotSearched)
    def tell_not_searched(self, event: NotSearched) -> None:
        """Show why documents are not searched."""
        self.notify(_("The documents were not searched: {reason}", reason=event.reason), severity="error", timeout=20)

    @on(NotKept)
    def tell_not_kept(self, event: NotKept) -> None:
        """Show why chats are not saved."""
        self.notify(_("This chat is not being saved: {reason}", reason=event.reason), severity="error", timeout=20)

    # Start and end

    def get_driver_class(self) -> type[Driver]:
        """The platform's driver, made robust against a closed terminal and one that reports no size."""
        ensure_size()
        return surviving(super().get_driver_class())

    def get_default_screen(self) -> Screen[None]:
        """The chat screen."""
        return ChatScreen(self.session)

    def on_mount(self) -> None:
        """Start the runtime once the first frame is out."""
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        if self.session.settings.keys or self.session.settings.vim == "on":
            self.apply_keys()
        self.app_resume_signal.subscribe(self, self._repaint)
        self.call_after_refresh(self._start)

    def _repaint(self, _app: App[object]) -> None:
        """Draw all of every screen after `fg`, and name the window: the shell has written over both."""
        self._titled, self._marked = "", NO_PROGRESS
        self._name_window()
        self._mark_progress()
        for screen in self.screen_stack:
            screen.refresh(layout=True)

    def apply_theme(self, settings: Settings) -> None:
        """Apply the theme of the settings."""
        self.theme = themes.NAMES[settings.theme]
        self.set_class(self.theme == themes.CONTRAST.name, "-high-contrast")

    def refresh_css(self, animate: bool = True) -> None:
        """Reload the style sheet if the colours changed. Textual also asks once at startup, when they have not."""
        variables = self.get_css_variables()
        if variables != self._applied_colors:
            self._applied_colors = variables
            super().refresh_css(animate)

    def _start(self) -> None:
        self.stylesheet.read(LATER_CSS)
        self.stylesheet.parse()
        for screen in self.screen_stack[1:]:  # a key was faster
            self.stylesheet.update(screen)
        self.run_worker(self.session.start, group="runtime", exit_on_error=False)  # type: ignore[arg-type]  # mypy infers Never
        freeze = not self.is_headless  # tests make many applications in one process
        self.run_worker(partial(preload, freeze=freeze), group="preload", thread=True, exit_on_error=False)
        self.set_interval(CHECK_INTERVAL_S, self._check)
        self.set_interval(WATCH_INTERVAL_S, self.session.watch)

    async def _check(self) -> None:
        if terminal_is_gone() and not self.is_headless:
            self.exit()  # not every terminal sends SIGHUP when it goes
            return
        if self._suspend.suspended_s() is not None:
            await self.session.wake()
        self._ring()
        self._checks += 1
        if self.session.remote is None or self._checks % REMOTE_CHECKS == 0:
            await self.session.refresh()

    def _ring(self) -> None:
        """Give notice of the end of long work, if the user looks elsewhere."""
        ended = self._long.ended(busy=self.session.working or self.session.answers.any)
        if ended and not self.app_focus and self._driver is not None:
            self._driver.write(notice(_("lowbit-chat has finished"), inside_tmux="TMUX" in os.environ))

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show an unexpected failure of a worker."""
        if event.state is WorkerState.ERROR:
            self.log.error(event.worker.error)
            self.notify(f"{type(event.worker.error).__name__}: {event.worker.error}", severity="error")

    def _handle_exception(self, error: Exception) -> None:
        """End the program, unless a widget that is being removed, or was before it had its parts, misses them.

        While the program is ending, that holds for all of it.
        """
        widget = active_message_pump.get(self)
        gone = widget._closing or widget._pruning if isinstance(widget, Widget) else False  # noqa: SLF001  no other way
        gone = gone or self._exit or not widget.is_attached
        if gone and isinstance(error, MountError | NoMatches | NoScreen):
            self.log.warning(error)
        else:
            super()._handle_exception(error)

    async def on_unmount(self) -> None:
        """Close the session; only the draft stays."""
        await self.session.close()

    @property
    def chat(self) -> ChatScreen:
        """The chat screen, even if another one covers it."""
        screen = self.screen_stack[0]
        assert isinstance(screen, ChatScreen)
        return screen

    # Events of the session

    @on(StatusChanged)
    @on(JobChanged)
    def show_session(self) -> None:
        """Update every screen. None is left when the program is ending."""
        if not self.screen_stack:
            return
        self._show("show_session")
        self.refresh_bindings()
        self._name_window()
        self._mark_progress()

    def _mark_progress(self) -> None:
        """Mark the terminal's window with the progress of the running job, if it can show that."""
        job = self.session.job
        mark = progress_mark(job.share) if job is not None and job.outcome == "running" else NO_PROGRESS
        if mark != self._marked and self._driver is not None and marks_progress():
            self._marked = mark
            self._driver.write(mark)

    def _name_window(self) -> None:
        """Give the terminal's window the title of the chat."""
        said = next((message.text for message in self.session.conversation.path() if message.role == "user"), "")
        title = self.TITLE
        if said:
            from app.history.store import title_of

            title = f"{title_of(said)} · {title}"
        if title != self._titled and self._driver is not None:
            self._titled = title
            self._driver.write(window_title(title))

    @on(LeftOut)
    def show_left_out(self) -> None:
        """Mark where the part of the chat that the model still reads begins."""
        self.chat.transcript.mark()

    @on(CallAsked)
    def ask_for_call(self, event: CallAsked) -> None:
        """Ask whether a call may run; later, if its chat is not on screen."""
        if event.conversation == self.session.conversation.id:
            self.chat.ask_next()
        else:
            self.notify(_("Another chat asks whether it may call a tool."))

    @on(ToolsChanged)
    def show_tools(self) -> None:
        """Update the screen of tools."""
        self._show("show_tools")

    def _show(self, what: str) -> None:
        """Call a method of every screen that has it, but of none that is being mounted or removed: it lacks parts."""
        for screen in self.screen_stack:
            show = getattr(screen, what, None)
            if show is not None and screen.is_mounted and screen.display:
                show()

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Enable only the actions that are possible now."""
        if action == "chats":
            return self.session.history is not None
        if action in LOCAL_ACTIONS and self.session.remote is not None:
            return False
        if action in CHAT_ACTIONS:
            if not self.screen_stack or not isinstance(self.screen, ChatScreen):
                return False
            path = self.session.conversation.path()
            if action == "stop":
                return (
                    self.screen.editing
                    or self.screen.busy
                    or self.screen.attaching
                    or (self.session.job is not None and self.session.job.outcome != "done")
                )
            if action in ("copy_answer", "edit"):
                return bool(path) and (action == "copy_answer" or not (self.screen.busy or self.screen.composer.chord))
            if action == "regenerate":
                return bool(path) and not self.screen.busy
            if action == "continue":
                return bool(path) and path[-1].resumable and not self.screen.busy
        return True

    async def action_new_chat(self) -> None:
        """Start a new chat, with the model that became ready in the meantime if there is one."""
        self._confirm_if_unsaved(_("Start a new chat"), self._new_chat)

    async def _new_chat(self) -> None:
        await self.chat.new_chat()
        if self.session.made is not None and not self.session.working:
            self.post_message(LoadAsked(self.session.made))

    async def action_quit(self) -> None:
        """Quit, after a confirmation if a chat would be lost."""
        self._confirm_if_unsaved(_("Quit"), self._leave)

    async def _leave(self) -> None:
        self.chat.cancel_edit()
        self.chat.save_draft()
        self.exit()

    def _confirm_if_unsaved(self, verb: str, act: Callable[[], Awaitable[None]]) -> None:
        """Run an action that ends the chat; ask first if the chat would be lost."""
        if not self.chat.unsaved:
            self.call_later(act)
            return
        from app.tui.screens.dialogs import ConfirmDialog

        def decided(confirmed: bool | None) -> None:
            if confirmed:
                self.call_later(act)

        if not isinstance(self.screen, ConfirmDialog):
            told = _("This chat is not saved (F3, history) and will be lost. Copy what you need first.")
            self.push_screen(ConfirmDialog(told, verb), decided)

    def action_chats(self) -> None:
        """Show the saved chats: in the sidebar, or on their own screen if the terminal is narrow."""
        if self.session.history is None or (self.screen is self.chat and self.chat.toggle_sidebar()):
            return
        from app.tui.screens.chats import ChatsScreen

        if not isinstance(self.screen, ChatsScreen):
            self._open(ChatsScreen(self.session))

    @on(ChatAsked)
    async def open_chat(self, event: ChatAsked) -> None:
        """Open a saved chat, or one from a file."""
        from app.history.exchange import ImportedChat

        if isinstance(event.chat, ImportedChat):
            self._confirm_if_unsaved(_("Open the file"), partial(self.chat.open_chat, event.chat))
        else:
            await self.chat.open_chat(event.chat)

    @on(ChatEnded)
    async def show_empty_chat(self) -> None:
        """Replace the deleted chat on the screen with an empty one."""
        await self.chat.transcript.reopen()
        self.show_session()

    async def action_regenerate(self) -> None:
        """Regenerate the last answer."""
        await self.chat.regenerate()

    async def action_continue(self) -> None:
        """Continue an answer that ended early."""
        await self.chat.resume()

    def action_edit(self) -> None:
        """Edit the last prompt as a new branch."""
        self.chat.edit()

    def action_editor(self) -> None:
        """Edit the draft in the user's editor. What is drawn waits, too."""
        composer = self.chat.composer
        try:
            with self.suspend():
                edited = clipboard.edit(composer.text)
        except (CommandError, SuspendNotSupported) as error:
            self.notify(str(error) or _("This terminal can't be lent to an editor."), severity="error", timeout=10)
            return
        composer.rewrite(edited)

    def action_export(self) -> None:
        """Begin the command that writes this chat to a file."""
        if self.chat.composer.text:
            self.notify(_("Send or clear the draft first, then type /save FILE."), severity="warning")
        else:
            self.chat.composer.rewrite("/save ")

    def action_attach(self) -> None:
        """Attach a file or folder."""
        self.chat.attach()

    def action_chat_settings(self) -> None:
        """Edit the system prompt and sampling of this chat."""
        self.chat.settings_of_chat()

    def action_presets(self) -> None:
        """Choose a system prompt preset for this chat."""
        self.chat.choose_preset()

    def action_inspect(self) -> None:
        """Inspect the tokens of the last answer."""
        self.chat.inspect()

    def action_help(self, commands: bool = False) -> None:
        """List the keys, or first the commands."""
        from app.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(commands=commands))

    def action_log(self) -> None:
        """Show the runtime's log."""
        from app.tui.screens.help import LogScreen

        if not isinstance(self.screen, LogScreen):
            self._open(LogScreen())

    async def action_stop(self) -> None:
        """Cancel an edit, else stop the answer, a document, the running work, else dismiss a failure."""
        if self.chat.cancel_edit() or await self.chat.stop() or self.chat.stop_attaching():
            return
        await self.action_stop_work()

    def action_models(self) -> None:
        """Open the models screen; a remote server's models are a plain list."""
        if self.session.remote is not None:
            from app.tui.endpoint import pick_model

            self.run_worker(pick_model(self), group="models", exit_on_error=False)
            return
        from app.tui.screens.models import ModelsScreen

        if not isinstance(self.screen, ModelsScreen):
            self._open(ModelsScreen(self.session))

    def action_endpoint(self) -> None:
        """Ask which server to use."""
        from app.tui.endpoint import ask_endpoint

        ask_endpoint(self)

    def action_settings(self) -> None:
        """Open the settings screen."""
        from app.tui.screens.settings import SettingsScreen

        if not isinstance(self.screen, SettingsScreen):
            self._open(SettingsScreen(self.session))

    def action_tools(self) -> None:
        """Open the tools screen."""
        from app.tui.screens.tools import ToolsScreen

        if not isinstance(self.screen, ToolsScreen):
            self._open(ToolsScreen(self.session, self.chat.composer))

    def action_device(self) -> None:
        """Open the device screen."""
        from app.tui.screens.device import DeviceScreen

        if not isinstance(self.screen, DeviceScreen):
            self._open(DeviceScreen(self.session))

    def _open(self, screen: Screen[None]) -> None:
        apply = getattr(self.screen, "apply", None)
        if apply is not None:
            apply()
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(screen)

    def action_scroll_chat(self, pages: int) -> None:
        """Scroll the messages: a page up or down (-1, 1), to the start (-2), to the end (2)."""
        transcript = self.chat.transcript
        if pages == -1:
            transcript.scroll_page_up(animate=False)
        elif pages == 1:
            transcript.scroll_page_down(animate=False)
        elif pages == -2:
            transcript.scroll_home(animate=False)
        else:
            transcript.anchor()

    async def action_interrupt(self) -> None:
        """Stop the answer. If there is none, clear the draft; if that is empty, pressing twice quits."""
        if await self.chat.stop():
            return
        if self.screen is self.chat and self.chat.composer.text:
            self.chat.composer.rewrite("")
            return
        now = time.monotonic()
        if now - self._interrupted < QUIT_AGAIN_S:
            await self._leave()
        self._interrupted = now
        self.notify(_("Ctrl+C again quits."), timeout=QUIT_AGAIN_S)

    def action_copy_answer(self) -> None:
        """Copy the Markdown source of the last answer."""
        answers = [message for message in self.session.conversation.path() if message.role == "assistant"]
        if answers and answers[-1].text:
            self.copy_to_clipboard(answers[-1].text)
            self.notify(_("Answer copied."), timeout=2)
        else:
            self.notify(_("There is no answer to copy."), severity="warning")

    def copy_to_clipboard(self, text: str) -> None:
        """Copy through the terminal and through the system's clipboard tools, since each fails somewhere."""
        super().copy_to_clipboard(text)
        if self._driver is not None and "TMUX" in os.environ:
            self._driver.write(clipboard.osc52(text, inside_tmux=True))
        self.run_worker(clipboard.copy_with_tools(text), group="clipboard", exclusive=True, exit_on_error=False)

    def get_key_display(self, binding: Binding) -> str:
        """The footer's spelling of a key: `^N`, `Esc`, `F2`."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown[:1] in ("^", "f") else shown.capitalize()

    def action_command_palette(self) -> None:
        """Open the command palette."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(id="--command-palette", placeholder=_("Search for commands…")))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002  Textual gives it
        """The entries of the command palette."""
        for command, _words in commands(self):
            yield command
