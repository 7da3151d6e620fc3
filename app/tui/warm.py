"""What the program does while nobody waits for it: imports that the first answer needs, and rest for the collector."""

from __future__ import annotations

import gc

FULL_EVERY = 100
"""Collections of the middle generation between two of everything; Python's own 10 gives pauses within answers."""


def warm(*, freeze: bool) -> None:
    """Import what the first answer needs, before it is there; called in a thread, for it takes a while.

    Args:
        freeze: whether what is there by then is left out of garbage collection. It stays until the end, and to look
            through all of it took 0.1 to 0.2 s again and again, in the middle of answers.
    """
    from app.tui.widgets import markdown_body

    markdown_body.warm()
    if freeze:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_EVERY)
