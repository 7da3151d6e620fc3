"""The part of the application that does what screens ask for: loads, makes, tunes, deletes models; keeps settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from textual import on
from textual.app import App

from app import settings as stored
from app.errors import ClientError
from app.settings import Settings, SettingsError
from app.tui.getting import unfinished
from app.tui.keys import KEYS, keymap_of
from app.tui.messages import (
    LoadAsked,
    QuantizeAsked,
    ReloadAsked,
    RemoveAsked,
    RuntimeLost,
    SettingChanged,
    TuneAsked,
)
from app.tui.session import Session
from app.tui.widgets.composer import Composer
from app.tui.widgets.message_view import MessageView

if TYPE_CHECKING:
    from app.tui.screens.chat import ChatScreen
    from runtime.wire.requests import QuantizeRequest


MADE_TOLD_S = 60
"""Seconds for which it is told that a model is there: making it took minutes, and somebody may look elsewhere."""
CHANGEABLE = (*KEYS, *Composer.BINDINGS, *MessageView.BINDINGS)
"""Actions that can be given other keys."""


class WorkApp(App[None]):
    """Runs work with the session, in the background, and tells how it ended."""

    session: Session
    made: str | None = None
    """A model that was made while somebody chatted with another one: the next new chat is had with it."""
    keymap: Mapping[str, str] = MappingProxyType({})
    """Keys that a person changed, by the ids of actions."""

    @property
    @abstractmethod
    def chat(self) -> ChatScreen:
        """The chat screen, whatever is shown above it."""

    @abstractmethod
    def show_session(self) -> None:
        """Bring every screen up to date."""

    def take_keys(self) -> None:
        """Let the keys of the settings do what they are to do; what can't be understood is told and changes nothing."""
        try:
            self.keymap = keymap_of(self.session.settings.keys, CHANGEABLE)
        except SettingsError as error:
            self.notify(str(error), severity="error", markup=False, timeout=15)
        else:
            self.set_keymap(self.keymap)

    @abstractmethod
    def wear_theme(self, settings: Settings) -> None:
        """Take the colours of the settings."""

    @on(RuntimeLost)
    def recover(self, event: RuntimeLost) -> None:
        """Start the runtime again; the conversation is untouched."""
        if not self.chat.busy:  # else the answer says so
            self.notify(f"{event.reason}.", severity="warning", markup=False)
        self.run_worker(self.session.recover(), group="runtime", exit_on_error=False)

    @on(LoadAsked)
    def load_model(self, event: LoadAsked) -> None:
        """Load a model, and remember it, if it is one of this machine's."""
        self.made = None
        if self.session.remote is None:
            self.keep_settings({"model": event.name})
        self.run_worker(self._load(event.name), group="work", exit_on_error=False)

    async def _load(self, name: str) -> None:
        await self.chat.stop()
        await self.session.load(name)

    @on(ReloadAsked)
    def reload_model(self) -> None:
        """Load the same model with other settings."""
        if self.session.wanted is not None:
            self.run_worker(self._load(self.session.wanted), group="work", exit_on_error=False)

    @on(QuantizeAsked)
    async def quantize(self, event: QuantizeAsked) -> None:
        """Make a low-bit model in the background."""
        self.run_worker(self._get(event.request), group="work", exit_on_error=False)

    async def _get(self, request: QuantizeRequest) -> None:
        got = await self.session.get(request)
        if got is not None and got.loaded:
            self.keep_settings({"model": got.made})
        elif got is not None and got.made is not None and self.session.job and self.session.job.outcome == "done":
            self.made = got.made
            self.notify(f"{got.made} is ready: ^N begins a chat with it.", markup=False, timeout=MADE_TOLD_S)
        self.show_session()

    def action_resume_work(self) -> None:
        """Go on with getting a model that was stopped, or that the program was quit in."""
        if not self.session.working and (request := unfinished()) is not None:
            self.post_message(QuantizeAsked(request))
        elif not self.session.working and self.session.wanted is not None:
            self.post_message(LoadAsked(self.session.wanted))

    async def action_stop_work(self) -> None:
        """Stop loading, quantizing or tuning; where nothing runs, put a failure out of sight."""
        if self.session.working:
            await self.session.stop_work()
        else:
            self.action_dismiss_job()

    def action_dismiss_job(self) -> None:
        """Put a job that ended out of sight."""
        self.session.dismiss_job()
        self.show_session()

    def action_restart_runtime(self) -> None:
        """Start the runtime anew and load the model again."""
        self.run_worker(self.session.recover(), group="runtime", exit_on_error=False)

    @on(TuneAsked)
    def tune(self) -> None:
        """Measure again, and apply the budget to the model that runs."""
        self._compensate(force=True)

    def _compensate(self, *, force: bool) -> None:
        """Apply budget or k_chunk; a newer wish replaces one that waits or is worked on."""
        self.run_worker(self._tune(force=force), group="tune", exclusive=True, exit_on_error=False)

    async def _tune(self, *, force: bool) -> None:
        if await self.session.tune(force=force):
            for problem in await self.session.without_effect():
                self.notify(f"{problem.what}: {problem.fix}", severity="warning", markup=False, timeout=15)

    @on(RemoveAsked)
    async def remove_model(self, event: RemoveAsked) -> None:
        """Delete a stored model."""
        try:
            await self.session.remove(event.name)
        except (ClientError, OSError) as error:
            self.notify(str(error), severity="error", markup=False)
        self.show_session()

    @on(SettingChanged)
    def change_setting(self, event: SettingChanged) -> None:
        """Apply and keep a setting."""
        self.session.settings = self.session.settings.changed({event.key: event.value})
        self.keep_settings({event.key: event.value})
        if event.key == "theme":
            self.wear_theme(self.session.settings)
        elif event.key == "keys":
            self.take_keys()
        elif event.key == "sidebar":
            self.chat.show_session()
        elif event.key in ("k_chunk", "prompt_budget") or (
            event.key == "budget" and self.session.settings.k_chunk is None
        ):
            self._compensate(force=False)

    def keep_settings(self, changes: dict[str, str | int | float | None]) -> None:
        """Write settings into the file."""
        try:
            stored.save(changes)
        except SettingsError as error:
            self.notify(str(error), severity="error", markup=False)
