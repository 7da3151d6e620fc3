"""Ctrl-C: the first asks the running work to stop cleanly, the second stops the program immediately."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """Context manager: Ctrl-C sets `pressed` instead of raising; pressed again, it raises `KeyboardInterrupt`.

    Work takes `cancelled` as its argument of that name. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def cancelled(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.pressed

    def raise_if_pressed(self) -> None:
        """Raise as Ctrl-C does, now that the work has stopped."""
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """Restore Ctrl-C. Work that failed because it was stopped ends as with Ctrl-C."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
        if error is not None:
            self.raise_if_pressed()

    def _press(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
