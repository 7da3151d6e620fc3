"""Work done while the program is idle after its start: imports for the first answer, and settings of the collector."""

from __future__ import annotations

import gc

FULL_EVERY = 100
"""Collections of the middle generation per full collection. Python's default of 10 causes pauses during answers."""


def preload(*, freeze: bool) -> None:
    """Import what the first answer needs. Runs in a thread, because it takes a while.

    Args:
        freeze: whether to exclude all present objects from garbage collection. They live until the end, and scanning
            them took 0.1 to 0.2 s again and again in the middle of answers.
    """
    from app.tui.widgets import markdown_body

    markdown_body.preload()
    if freeze:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_EVERY)
        gc.enable()
