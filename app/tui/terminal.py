"""Whether there still is a terminal: a closed window, a lost connection."""

from __future__ import annotations

import select
import sys


def terminal_is_gone() -> bool:
    """Whether the terminal that standard input was has been closed. Always False where that can't be asked."""
    if not hasattr(select, "poll") or sys.__stdin__ is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.__stdin__.fileno(), select.POLLHUP)
        return any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True
