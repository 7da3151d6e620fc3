"""The terminal UI. It speaks HTTP to the runtime process and never imports torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from app.tui.terminal import terminal_is_gone

if TYPE_CHECKING:
    from app.settings import Settings

_HANGUP_STATUS = 129
"""Exit status after the terminal was closed: 128 and the number of SIGHUP, as a shell reports it."""


def run(settings: Settings | None = None) -> int:
    """Run the terminal UI until the person quits.

    Args:
        settings: what the command line gathered; by default what `app.settings.load` finds.

    Returns:
        The exit status: 0, or 1 when the UI failed.

    Raises:
        SettingsError: a setting is not acceptable.
    """
    from app import paths
    from app.settings import load
    from app.tui.app import ChatApp

    app = ChatApp(settings if settings is not None else load(), history=paths.history_file())
    try:
        app.run()
    finally:
        if terminal_is_gone():
            # Textual's input thread does not end without a terminal, and the interpreter would wait for it.
            os._exit(_HANGUP_STATUS)
    return app.return_code or 0
