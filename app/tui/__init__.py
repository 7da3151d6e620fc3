"""The terminal UI. It speaks HTTP to the runtime process and never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.settings import Settings


def run(settings: Settings | None = None) -> int:
    """Run the terminal UI until the person quits.

    Args:
        settings: what the command line gathered; by default what `app.settings.load` finds.

    Returns:
        The exit status: 0, or 1 when the UI failed.

    Raises:
        SettingsError: a setting is not acceptable.
    """
    from app.settings import load
    from app.tui.app import ChatApp

    app = ChatApp(settings if settings is not None else load())
    app.run()
    return app.return_code or 0
