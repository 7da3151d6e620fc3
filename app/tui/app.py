"""The application: it paints first, then starts the runtime, and connects screens, keys and session."""

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
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.screen import Screen
from textual.worker import Worker, WorkerState

from app import paths
from app import settings as stored
from app.conversation import Conversation
from app.settings import Settings
from app.tui import clipboard, elsewhere, themes
from app.tui.kept import KeptChats
from app.tui.keys import KEYS
from app.tui.messages import (
    ChatAsked,
    ChatEnded,
    JobChanged,
    LeftOut,
    NotKept,
    StatusChanged,
)
from app.tui.naps import Naps
from app.tui.palette import commands
from app.tui.runtime import SupervisorLike
from app.tui.screens.chat import ChatScreen
from app.tui.session import Session
from app.tui.terminal import ensure_size, outliving, terminal_is_gone
from app.tui.warm import warm
from app.tui.work_app import WorkApp

CHECK_INTERVAL_S = 5.0
REMOTE_CHECKS = 12
"""A server elsewhere is asked every so many intervals whether it is still there."""
QUIT_AGAIN_S = 2.0
OF_THE_CHAT = frozenset(
    {
        "new_chat", "regenerate", "continue", "copy_answer", "stop", "edit", "attach", "chat_settings", "presets",
        "inspect",
    }
)  # fmt: skip
"""Actions that only the chat screen has."""


def _own_supervisor(settings: Settings) -> SupervisorLike:
    from app.supervisor import Supervisor

    minutes = settings.idle_unload
    return Supervisor(paths.home(), idle_minutes=stored.DEFAULT_IDLE_MINUTES if minutes is None else minutes)


class ChatApp(WorkApp):
    """The terminal UI."""

    TITLE = "lowbit-chat"
    CSS_PATH = "chat.tcss"
    ENABLE_COMMAND_PALETTE = True
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
            settings: the settings to begin with.
            supervisor: makes what starts the runtime; called after the first paint. This program's own by default.
            history: file in which chats are kept; they end with the program where there is none.
            now: the time of day, for the messages.
        """
        super().__init__()
        for theme in themes.OWN:
            self.register_theme(theme)
        self.wear_theme(settings)
        self._worn = self.get_css_variables()
        self.stylesheet.set_variables(self._worn)
        conversation = Conversation(now) if now else Conversation()
        kept = KeptChats(history, self._cannot_keep) if history else None
        own = supervisor or (lambda: _own_supervisor(settings))
        self.session = Session(
            lambda: self._supervisor(own), settings, self.post_message, conversation=conversation, kept=kept
        )
        self._interrupted = -QUIT_AGAIN_S
        self._naps = Naps(CHECK_INTERVAL_S)
        self._checks = 0

    def _supervisor(self, own: Callable[[], SupervisorLike]) -> SupervisorLike:
        """Our own runtime's, or that of the server elsewhere that is set."""
        settings = self.session.settings
        if settings.endpoint is None:
            return own()
        from app.remote import RemoteSupervisor

        return RemoteSupervisor(settings.endpoint, settings.endpoint_token)

    def _cannot_keep(self, reason: str) -> None:
        """Called by any thread."""
        self.post_message(NotKept(reason))

    @on(NotKept)
    def tell_not_kept(self, event: NotKept) -> None:
        """Tell why chats are not kept."""
        self.notify(f"This chat is not kept: {event.reason}", severity="error", markup=False, timeout=20)

    # Start and end

    def get_driver_class(self) -> type[Driver]:
        """The platform's driver, which neither a closed terminal nor one without a size disturbs."""
        ensure_size()
        return outliving(super().get_driver_class())

    def get_default_screen(self) -> Screen[None]:
        """The chat."""
        return ChatScreen(self.session)

    def on_mount(self) -> None:
        """Start the runtime once the first frame is out."""
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        if self.session.settings.keys:
            self.take_keys()
        self.call_after_refresh(self._start)

    def wear_theme(self, settings: Settings) -> None:
        """Take the colours of the settings."""
        self.theme = themes.NAMES[settings.theme]
        self.set_class(self.theme == themes.CONTRAST.name, "-high-contrast")

    def refresh_css(self, animate: bool = True) -> None:
        """Read the style sheet again if the colours are others: Textual also asks at its start, for what is there."""
        variables = self.get_css_variables()
        if variables != self._worn:
            self._worn = variables
            super().refresh_css(animate)

    def _start(self) -> None:
        self.run_worker(self.session.start(), group="runtime", exit_on_error=False)
        freeze = not self.is_headless  # tests make many applications in one process
        self.run_worker(partial(warm, freeze=freeze), group="warm", thread=True, exit_on_error=False)
        self.set_interval(CHECK_INTERVAL_S, self._check)

    async def _check(self) -> None:
        if terminal_is_gone() and not self.is_headless:
            self.exit()  # not every terminal sends SIGHUP when it goes
            return
        if self._naps.slept() is not None:
            await self.session.wake()
        self._checks += 1
        if self.session.remote is None or self._checks % REMOTE_CHECKS == 0:
            await self.session.refresh()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Tell a failure that nobody expected."""
        if event.state is WorkerState.ERROR:
            self.log.error(event.worker.error)
            self.notify(f"{type(event.worker.error).__name__}: {event.worker.error}", severity="error", markup=False)

    async def on_unmount(self) -> None:
        """Leave nothing behind but the draft."""
        await self.session.close()

    @property
    def chat(self) -> ChatScreen:
        """The chat screen, whatever is shown above it."""
        screen = self.screen_stack[0]
        assert isinstance(screen, ChatScreen)
        return screen

    # What the session says

    @on(StatusChanged)
    @on(JobChanged)
    def show_session(self) -> None:
        """Bring every screen up to date; at the end of the program there is none left."""
        if not self.screen_stack:
            return
        for screen in self.screen_stack:
            show = getattr(screen, "show_session", None)
            if show is not None:
                show()
        self.refresh_bindings()

    @on(LeftOut)
    def show_left_out(self) -> None:
        """Mark from where on the model reads the chat."""
        self.chat.transcript.mark()

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Offer only what can be done here and now."""
        if action == "chats":
            return self.session.kept is not None
        if action in elsewhere.OWN_ALONE and self.session.remote is not None:
            return False
        if action in OF_THE_CHAT:
            if not self.screen_stack or not isinstance(self.screen, ChatScreen):
                return False
            path = self.session.conversation.path()
            if action == "stop":
                return (
                    self.screen.editing
                    or self.screen.busy
                    or (self.session.job is not None and self.session.job.outcome != "done")
                )
            if action in ("copy_answer", "edit"):
                return bool(path) and (action == "copy_answer" or not self.screen.busy)
            if action == "regenerate":
                return bool(path) and not self.screen.busy
            if action == "continue":
                return bool(path) and path[-1].resumable and not self.screen.busy
        return True

    async def action_new_chat(self) -> None:
        """Begin anew; a chat that would be lost by it is asked for first."""
        self._unless_losing("Begin anew", self.chat.new_chat)

    async def action_quit(self) -> None:
        """End the program; a chat that would be lost by it is asked for first."""
        self._unless_losing("Quit", self._leave)

    async def _leave(self) -> None:
        self.chat.cancel_edit()
        self.chat.save_draft()
        self.exit()

    def _unless_losing(self, verb: str, act: Callable[[], Awaitable[None]]) -> None:
        """Do what ends the chat, if nothing is lost by it or the person says yes."""
        if not self.chat.losable:
            self.call_later(act)
            return
        from app.tui.screens.dialogs import ConfirmDialog

        def decided(confirmed: bool | None) -> None:
            if confirmed:
                self.call_later(act)

        if not isinstance(self.screen, ConfirmDialog):
            told = "This chat is not kept (F3, history): it is gone then. Copy what you need before."
            self.push_screen(ConfirmDialog(told, verb), decided)

    def action_chats(self) -> None:
        """Show the chats that are kept: beside the one in sight, or on a screen of their own where that is narrow."""
        if self.session.kept is None or (self.screen is self.chat and self.chat.toggle_sidebar()):
            return
        from app.tui.screens.chats import ChatsScreen

        if not isinstance(self.screen, ChatsScreen):
            self._open(ChatsScreen(self.session))

    @on(ChatAsked)
    async def open_chat(self, event: ChatAsked) -> None:
        """Go on with a chat that is kept."""
        await self.chat.open_chat(event.chat)

    @on(ChatEnded)
    async def show_empty_chat(self) -> None:
        """Take the chat that was deleted out of sight."""
        await self.chat.transcript.reopen()
        self.show_session()

    async def action_regenerate(self) -> None:
        """Ask for another answer."""
        await self.chat.regenerate()

    async def action_continue(self) -> None:
        """Go on with an answer that ended early."""
        await self.chat.resume()

    def action_edit(self) -> None:
        """Write another prompt beside the last one."""
        self.chat.edit()

    def action_attach(self) -> None:
        """Send a text file with the message."""
        self.chat.attach()

    def action_chat_settings(self) -> None:
        """System prompt and sampling of this chat alone."""
        self.chat.settings_of_chat()

    def action_presets(self) -> None:
        """Choose a system prompt that has a name."""
        self.chat.choose_preset()

    def action_inspect(self) -> None:
        """Look at the tokens of the last answer."""
        self.chat.inspect()

    def action_help(self) -> None:
        """List the keys."""
        from app.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_log(self) -> None:
        """Show what the runtime wrote."""
        from app.tui.screens.help import LogScreen

        if not isinstance(self.screen, LogScreen):
            self._open(LogScreen())

    async def action_stop(self) -> None:
        """Give up an edit, else stop the answer, else the work that runs, else put a failure out of sight."""
        if self.chat.cancel_edit():
            return
        if await self.chat.stop():
            return
        await self.action_stop_work()

    def action_models(self) -> None:
        """Open the models; those of a server elsewhere are a plain list."""
        if self.session.remote is not None:
            self.run_worker(elsewhere.pick_model(self), group="models", exit_on_error=False)
            return
        from app.tui.screens.models import ModelsScreen

        if not isinstance(self.screen, ModelsScreen):
            self._open(ModelsScreen(self.session))

    def action_endpoint(self) -> None:
        """Ask which server answers."""
        elsewhere.ask_endpoint(self)

    def action_settings(self) -> None:
        """Open the settings."""
        from app.tui.screens.settings import SettingsScreen

        if not isinstance(self.screen, SettingsScreen):
            self._open(SettingsScreen(self.session))

    def action_device(self) -> None:
        """Open the device."""
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
        """Stop the answer; where there is none, quit when asked twice."""
        if await self.chat.stop():
            return
        now = time.monotonic()
        if now - self._interrupted < QUIT_AGAIN_S:
            await self._leave()
        self._interrupted = now
        self.notify("Ctrl+C again quits.", timeout=QUIT_AGAIN_S)

    def action_copy_answer(self) -> None:
        """Copy the last answer as it was written."""
        answers = [message for message in self.session.conversation.path() if message.role == "assistant"]
        if answers and answers[-1].text:
            self.copy_to_clipboard(answers[-1].text)
            self.notify("The answer is copied.", timeout=2)
        else:
            self.notify("There is no answer to copy.", severity="warning")

    def copy_to_clipboard(self, text: str) -> None:
        """Copy through the terminal and through the system's own tools, since each fails somewhere."""
        super().copy_to_clipboard(text)
        if self._driver is not None and "TMUX" in os.environ:
            self._driver.write(clipboard.osc52(text, inside_tmux=True))
        self.run_worker(clipboard.copy_with_tools(text), group="clipboard", exclusive=True, exit_on_error=False)

    def get_key_display(self, binding: Binding) -> str:
        """How a key is written in the footer: `^N`, `Esc`, `F2`."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown[:1] in ("^", "f") else shown.capitalize()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002  Textual gives it
        """The entries of the command palette."""
        yield from commands(self)
