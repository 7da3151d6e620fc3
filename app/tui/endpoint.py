"""Dialogs that choose another server instead of the program's own runtime, and one of that server's models."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList
from textual.widgets.option_list import Option

from app.errors import ClientError
from app.language import _
from app.printable import printable_name
from app.remote import endpoint_problem
from app.tui.messages import LoadAsked
from app.tui.plain import Plain, plain
from app.tui.screens.dialogs import FormDialog
from app.tui.work_app import WorkApp


async def pick_model(app: WorkApp) -> None:
    """Ask which of the server's models to use."""
    session = app.session
    try:
        names = [model.name for model in await session.client().models()]
    except (ClientError, OSError) as error:
        app.notify(str(error), severity="error")
        return

    def picked(name: str | None) -> None:
        if name is not None:
            app.post_message(LoadAsked(name))

    if not isinstance(app.screen, RemoteModels):
        current = session.status.model if session.status is not None else None
        app.push_screen(RemoteModels(names, current, session.remote or ""), picked)


def ask_endpoint(app: WorkApp) -> None:
    """Ask for the address of a server, and switch to it."""
    session = app.session

    def chosen(found: tuple[str, str] | None) -> None:
        if found is not None:
            changes: dict[str, str | int | float | None] = {"endpoint": found[0] or None, "endpoint_token": found[1]}
            session.settings = session.settings.changed(changes)
            app.keep_settings(changes)
            app.run_worker(session.switch(), group="runtime", exit_on_error=False)

    app.push_screen(EndpointDialog(session.settings.endpoint or "", session.settings.endpoint_token), chosen)


class EndpointDialog(FormDialog[tuple[str, str]]):
    """Asks for the address and token of an OpenAI-compatible server. An empty address means our own runtime."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__()
        self._url, self._token = url, token

    def compose(self) -> ComposeResult:
        """Address, token, buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("Address of an OpenAI-compatible server (vLLM, SGLang, llama.cpp); empty for this machine"))
            yield Input(self._url, placeholder="http://host:8000/v1", compact=True, id="endpoint-url")
            yield Plain(_("Token, if it requires one; stored in the settings file, which only you can read"))
            yield Input(self._token, password=True, compact=True, id="endpoint-token")
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Use it"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept the address if it is valid."""
        url = self.query_one("#endpoint-url", Input).value.strip()
        token = self.query_one("#endpoint-token", Input).value.strip()
        problem = endpoint_problem(url, token) if url else None
        if problem is None:
            self.dismiss((url, token))
        else:
            line = self.query_one(".dialog-problem", Plain)
            line.update(problem)
            line.display = True


class RemoteModels(ModalScreen[str]):
    """Asks which of the server's models to use."""

    BINDINGS = [("escape", "dismiss", "back")]  # noqa: RUF012  declared so by Textual

    def __init__(self, names: Sequence[str], current: str | None, where: str) -> None:
        super().__init__()
        self._names, self._current, self._where = names, current, where

    def compose(self) -> ComposeResult:
        """The models."""
        with Vertical(classes="dialog"):
            yield Plain(_("Models of {where}", where=self._where))
            yield OptionList(*(Option(plain(printable_name(name))) for name in self._names), compact=True, markup=False)

    def on_mount(self) -> None:
        """Highlight the current one."""
        if self._current in self._names:
            self.query_one(OptionList).highlighted = self._names.index(self._current)

    @on(OptionList.OptionSelected)
    def pick(self, event: OptionList.OptionSelected) -> None:
        """Return the selected model."""
        self.dismiss(self._names[event.option_index])

    async def action_dismiss(self, result: str | None = None) -> None:
        """Back."""
        self.dismiss(result)
