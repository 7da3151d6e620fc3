"""A server elsewhere in the place of our own runtime: asked for its address, and for which of its models answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.errors import ClientError
from app.tui.messages import LoadAsked

if TYPE_CHECKING:
    from app.tui.app import ChatApp

OWN_ALONE = frozenset({"device", "inspect", "log"})
"""What can be done with our own runtime alone."""


async def pick_model(app: ChatApp) -> None:
    """Ask which of the server's models answers."""
    from app.tui.screens.endpoint_dialogs import RemoteModels

    session = app.session
    try:
        names = [model.name for model in await session.models()]
    except (ClientError, OSError) as error:
        app.notify(str(error), severity="error", markup=False)
        return

    def picked(name: str | None) -> None:
        if name is not None:
            app.post_message(LoadAsked(name))

    if not isinstance(app.screen, RemoteModels):
        current = session.status.model if session.status is not None else None
        app.push_screen(RemoteModels(names, current, session.remote or ""), picked)


def ask_endpoint(app: ChatApp) -> None:
    """Ask which server answers, and let it."""
    from app.tui.screens.endpoint_dialogs import EndpointDialog

    session = app.session

    def chosen(found: tuple[str, str] | None) -> None:
        if found is not None:
            changes: dict[str, str | int | float | None] = {"endpoint": found[0] or None, "endpoint_token": found[1]}
            session.settings = session.settings.changed(changes)
            app.keep_settings(changes)
            app.run_worker(session.switch(), group="runtime", exit_on_error=False)

    app.push_screen(EndpointDialog(session.settings.endpoint or "", session.settings.endpoint_token), chosen)
