"""Entry point of `lowbit-chat`: starts the terminal UI or the command line.

Without arguments there is nothing to parse, so the command line is not imported, and the screen appears sooner.
"""

from __future__ import annotations

import gc
import sys

from app.cli.output import NAME, at_a_terminal, sanitize_streams


def main() -> None:
    sanitize_streams()
    if len(sys.argv) > 1 or not at_a_terminal():
        from app.cli.main import main as command_line

        command_line()
        return
    gc.disable()  # until `app.tui.preload`: collections took a fourteenth of the time to the first paint
    from app.cli.output import explained, in_one_line
    from app.tui import run

    try:
        status = run()
    except explained() as error:
        print(f"{NAME}: {in_one_line(error)}", file=sys.stderr)
        status = 1
    sys.exit(status)


def tune() -> None:
    """The `tune-device` program."""
    sys.argv[1:1] = ["tune-device"]
    main()


if __name__ == "__main__":
    main()
