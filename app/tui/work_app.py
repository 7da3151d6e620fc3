"""The part of the application that loads, quantizes, tunes and deletes models and saves settings for the screens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from textual import on

from app import settings as stored
from app.errors import ClientError
from app.language import _
from app.reports import reported
from app.settings import Settings, SettingsError
from app.tui.keys import KEYS, VIM_MOVES, OrderedKeys, keymap_of
from app.tui.messages import (
    LoadAsked,
    QuantizeAsked,
    ReloadAsked,
    RemoveAsked,
    RuntimeLost,
    SettingChanged,
    TuneAsked,
    WithoutEffect,
)
from app.tui.model_setup import unfinished
from app.tui.plain import PlainApp
from app.tui.session import Session
from app.tui.widgets.composer import Composer
from app.tui.widgets.message_view import MessageView

if TYPE_CHECKING:
    from app.tui.screens.chat import ChatScreen
    from runtime.wire.requests import QuantizeRequest


READY_NOTICE_S = 60
"""Seconds for which a finished model is announced. Making it took minutes, so the user may be looking elsewhere."""
CHANGEABLE = (*KEYS, *Composer.BINDINGS, *MessageView.BINDINGS)
"""Bindings whose keys can be changed."""
LOCAL_ACTIONS = frozenset({"device", "inspect", "log"})
"""Actions that only the program's own runtime supports."""


class WorkApp(PlainApp, OrderedKeys):
    """Runs the session's jobs in the background and reports how they ended."""

    session: Session
    keymap: Mapping[str, str] = MappingProxyType({})
    """Keys that the user changed, by the ids of actions."""

    @property
    @abstractmethod
    def chat(self) -> ChatScreen:
        """The chat screen, even if another one covers it."""

    @abstractmethod
    def show_session(self) -> None:
        """Update every screen."""

    def apply_keys(self) -> None:
        """Apply the settings `keys` and `vim`. An invalid value is reported and changes nothing."""
        self.moves = VIM_MOVES if self.session.settings.vim == "on" else {}
        try:
            self.keymap = keymap_of(self.session.settings.keys, CHANGEABLE)
        except SettingsError as error:
            self.notify(str(error), severity="error", timeout=15)
        else:
            self.set_keymap(self.keymap)

    @abstractmethod
    def apply_theme(self, settings: Settings) -> None:
        """Apply the theme of the settings."""

    @on(RuntimeLost)
    def recover(self, event: RuntimeLost) -> None:
        """Restart the runtime; the conversation is unaffected."""
        if not self.chat.busy:  # otherwise the answer shows it
            self.notify(f"{event.reason}.", severity="warning")
        self.run_worker(self.session.recover(), group="runtime", exit_on_error=False)

    @on(LoadAsked)
    def load_model(self, event: LoadAsked) -> None:
        """Load a model, and save it in the settings if it is on this machine."""
        self.session.made = None
        if self.session.remote is None:
            self.keep_settings({"model": event.name})
        self.run_worker(self._load(event.name), group="work", exit_on_error=False)

    async def _load(self, name: str) -> None:
        await self.chat.stop()
        await self.session.load(name)

    @on(ReloadAsked)
    def reload_model(self) -> None:
        """Reload the model with the changed settings."""
        if self.session.wanted is not None:
            self.run_worker(self._load(self.session.wanted), group="work", exit_on_error=False)

    @on(QuantizeAsked)
    async def quantize(self, event: QuantizeAsked) -> None:
        """Quantize a model in the background."""
        self.run_worker(self._get(event.request), group="work", exit_on_error=False)

    async def _get(self, request: QuantizeRequest) -> None:
        got = await self.session.get(request)
        if got is not None and got.made is not None:
            self.keep_settings({"model": got.made})
            if not got.loaded and self.session.job and self.session.job.outcome == "done":
                self.session.made = got.made
                self.notify(_("{name} is ready: ^N starts a chat with it.", name=got.made), timeout=READY_NOTICE_S)
        self.show_session()

    def action_resume_work(self) -> None:
        """Resume setting up a model after it was stopped or the program was quit."""
        if not self.session.working and (request := unfinished()) is not None:
            self.post_message(QuantizeAsked(request))
        elif not self.session.working and self.session.wanted is not None:
            self.post_message(LoadAsked(self.session.wanted))

    async def action_stop_work(self) -> None:
        """Stop loading, quantizing or tuning; if nothing runs, dismiss a failure."""
        if self.session.working:
            await self.session.stop_work()
        else:
            self.action_dismiss_job()

    def action_dismiss_job(self) -> None:
        """Dismiss a finished job."""
        self.session.dismiss_job()
        self.show_session()

    def action_restart_runtime(self) -> None:
        """Restart the runtime and load the model again."""
        self.run_worker(self.session.recover(), group="runtime", exit_on_error=False)

    @on(TuneAsked)
    def tune(self) -> None:
        """Measure again, and apply the budget to the running model."""
        self._compensate(force=True)

    def _compensate(self, *, force: bool) -> None:
        """Apply budget or k_chunk; a newer request replaces one that is waiting or running."""
        self.run_worker(self.session.tune(force=force), group="tune", exclusive=True, exit_on_error=False)

    @on(WithoutEffect)
    def tell_problem(self, event: WithoutEffect) -> None:
        """Tell why a budget has no effect."""
        what, fix = reported(event.problem.what), reported(event.problem.fix)
        self.notify(f"{what}: {fix}", severity="warning", timeout=15)

    @on(RemoveAsked)
    async def remove_model(self, event: RemoveAsked) -> None:
        """Delete a stored model."""
        try:
            await self.session.remove(event.name)
        except (ClientError, OSError) as error:
            self.notify(str(error), severity="error")
        self.show_session()

    @on(SettingChanged)
    def change_setting(self, event: SettingChanged) -> None:
        """Apply and save a setting."""
        self.session.settings = self.session.settings.changed({event.key: event.value})
        self.keep_settings({event.key: event.value})
        if event.key == "theme":
            self.apply_theme(self.session.settings)
        elif event.key in ("keys", "vim"):
            self.apply_keys()
        elif event.key in ("k_chunk", "prompt_budget") or (
            event.key == "budget" and self.session.settings.k_chunk is None
        ):
            self._compensate(force=False)
        self.show_session()

    def keep_settings(self, changes: dict[str, str | int | float | None]) -> None:
        """Write settings to the file."""
        try:
            stored.save(changes)
        except SettingsError as error:
            self.notify(str(error), severity="error")
