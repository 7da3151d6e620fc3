"""Dialogs that choose another server instead of the program's own runtime, and one of that server's models."""

from __future__ import annotations

from app.errors import ClientError
from app.tui.messages import LoadAsked
from app.tui.work_app import WorkApp

LOCAL_ACTIONS = frozenset({"device", "inspect", "log"})
"""Actions that only the program's own runtime supports."""


async def pick_model(app: WorkApp) -> None:
    """Ask which of the server's models to use."""
    from app.tui.screens.endpoint_dialogs import RemoteModels

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
    from app.tui.screens.endpoint_dialogs import EndpointDialog

    session = app.session

    def chosen(found: tuple[str, str] | None) -> None:
        if found is not None:
            changes: dict[str, str | int | float | None] = {"endpoint": found[0] or None, "endpoint_token": found[1]}
            session.settings = session.settings.changed(changes)
            app.keep_settings(changes)
            app.run_worker(session.switch(), group="runtime", exit_on_error=False)

    app.push_screen(EndpointDialog(session.settings.endpoint or "", session.settings.endpoint_token), chosen)
