"""What the commands of `app.chat.commands` do in the terminal UI."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app.chat.commands import Command, budget_of, completions, load, path_of, save, with_setting, with_system
from app.errors import ClientError, CommandError, hint
from app.language import _
from app.printable import printable_name
from app.tui.messages import AttachAsked, ChatAsked, LoadAsked, SettingChanged
from app.tui.widgets.suggestions import Suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from textual.screen import Screen

    from app.tui.session import Session


class Commands:
    """Runs commands; `_NAME` is the command of that name, and gets its argument."""

    def __init__(
        self, screen: Screen[None], session: Session, *, changed: Callable[[], object], statistics: Callable[[], object]
    ) -> None:
        self._screen, self._session = screen, session
        self._changed, self._statistics = changed, statistics

    async def run(self, command: Command, argument: str) -> None:
        """Run a command.

        Raises:
            CommandError: it can't do what it is asked.
            ClientError: the runtime refused.
            HistoryError: a chat can't be read.
        """
        await getattr(self, f"_{command.name}")(argument)

    async def suggest(self, text: str) -> list[Suggestion]:
        """What a text that begins with a slash may become."""
        try:
            models = await self._models() if text.startswith("/model ") else []
        except (ClientError, OSError):
            models = []
        found = await asyncio.to_thread(completions, text, models)
        return [Suggestion(text=one, label=label or one) for one, label in found if one != text]

    async def _models(self) -> list[str]:
        return [model.name for model in await self._session.client().models()]

    async def _model(self, name: str) -> None:
        if not name:
            await self._screen.run_action("app.models")
            return
        models = await self._models()
        if name not in models:
            near = hint(name, models, _("F2 lists the models and gets others"))
            raise CommandError(_("there is no stored model {name}: {near}", name=printable_name(name), near=near))
        self._screen.app.post_message(LoadAsked(name))

    async def _system(self, text: str) -> None:
        self._own(with_system(self._session.conversation.extras.settings, text))
        self._screen.notify(_("This chat has its own system prompt.") if text else _("This chat uses the general one."))

    async def _set(self, rest: str) -> None:
        self._own(with_setting(self._session.conversation.extras.settings, rest))
        self._screen.notify(_("For this chat: {rest}", rest=rest))

    def _own(self, settings: Mapping[str, Any]) -> None:
        self._session.note(self._session.conversation, settings=settings)
        self._changed()

    async def _attach(self, path: str) -> None:
        self._screen.post_message(AttachAsked(path_of(path), f"/attach {path}"))

    async def _budget(self, percent: str) -> None:
        if self._session.remote is not None:
            raise CommandError(_("the budget applies to this machine, but another server answers"))
        budget = budget_of(percent)
        if self._session.settings.k_chunk is not None:  # it would override the budget
            self._screen.app.post_message(SettingChanged("k_chunk", None))
        self._screen.app.post_message(SettingChanged("budget", budget))

    async def _save(self, file: str) -> None:
        path = path_of(file)
        await asyncio.to_thread(save, self._session.conversation, path)
        self._screen.notify(_("Written to {path}.", path=path))

    async def _load(self, file: str) -> None:
        self._screen.app.post_message(ChatAsked(await asyncio.to_thread(load, path_of(file))))

    async def _stats(self, _rest: str) -> None:
        self._statistics()

    async def _tools(self, _rest: str) -> None:
        await self._screen.run_action("app.tools")

    async def _new(self, _rest: str) -> None:
        await self._screen.run_action("app.new_chat")

    async def _show(self, _rest: str) -> None:
        await self._screen.run_action("app.chat_settings")

    async def _help(self, _rest: str) -> None:
        await self._screen.run_action("app.help(True)")

    async def _bye(self, _rest: str) -> None:
        await self._screen.run_action("app.quit")
