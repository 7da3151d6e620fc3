"""Keeps a conversation while it goes on. A thread writes what changed, so that the screen never waits for a disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.conversation import Extras, Message
from app.errors import HistoryError
from app.history.store import History

INTERVAL_S = 0.5
"""Between two writes, so that at most so much of an answer is lost when the program is killed."""
FLUSH_S = 30.0
"""Longest wait for a disk, or for another program that has locked the file."""
K = TypeVar("K")
V = TypeVar("V")
Messages = dict[tuple[str, str], tuple[str | None, Message]]
Notes = dict[str, tuple[str | None, Extras]]


class Recorder:
    """Writes messages to a history. `close` writes what is left.

    What cannot be written is told once and tried again with whatever is recorded next.

    Args:
        path: The history's file; opened by the thread, when there is something to write.
        on_error: Told, by the thread and once, why chats are not kept.
    """

    def __init__(self, path: Path, on_error: Callable[[str], object]) -> None:
        self._path, self._on_error = path, on_error
        self._history: History | None = None
        self._waiting: Messages = {}
        self._notes: Notes = {}
        self._stuck: tuple[Messages, Notes] = {}, {}  # what could not be written; the thread's own
        self._told = False
        self._changed = threading.Condition()
        self._closed = False
        self._hurry = False
        self._writing = False
        self._thread: threading.Thread | None = None

    def record(self, chat: str, head: str | None, message: Message) -> None:
        """Keep a message, new or changed, soon."""
        with self._changed:
            if self._closed:
                return
            idle = not self._due  # else the thread knows, and need not wake for every word
            self._waiting[chat, message.id] = (head, message)
            self._wake(idle=idle)

    def note(self, chat: str, head: str | None, extras: Extras) -> None:
        """Keep which message of a chat is shown last, and what belongs to it beside its messages, soon."""
        with self._changed:
            if self._closed:
                return
            idle = not self._due
            self._notes[chat] = (head, extras)
            self._wake(idle=idle)

    @property
    def _due(self) -> bool:
        return bool(self._waiting or self._notes)

    def _wake(self, *, idle: bool) -> None:
        """Let the thread write; the lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()
        if idle:
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all that was recorded is written, or can't be."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._due or self._writing), FLUSH_S)
            self._hurry = False

    def close(self) -> None:
        """Write what is left, and end the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._write():
                pass
            if any(self._stuck):
                self._put({}, {})
        finally:
            if self._history is not None:
                self._history.close()

    def _write(self) -> bool:
        """Write what waits; whether there may be more to come."""
        with self._changed:
            while not (self._due or self._closed):
                self._changed.wait()
            waiting, self._waiting = self._waiting, {}
            notes, self._notes = self._notes, {}
            self._writing = True
        self._put(waiting, notes)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._hurry, INTERVAL_S)
            return self._due or not self._closed

    def _put(self, waiting: Messages, notes: Notes) -> None:
        """Write what is stuck and what waits. What the file does not take is stuck; what no file would take is lost."""
        messages, others = self._stuck = self._stuck[0] | waiting, self._stuck[1] | notes
        try:
            history = self._history = self._history or History(self._path)
            self._each(messages, lambda key, kept: history.record(key[0], kept[0], [kept[1]]))
            self._each(others, lambda chat, kept: history.note(chat, *kept))
        except Exception as error:  # noqa: BLE001 -- the thread must live on, or nothing is kept any more
            self._tell(error)

    def _each(self, waiting: dict[K, V], write: Callable[[K, V], None]) -> None:
        """Write one after the other, and take out what is written.

        Raises:
            HistoryError: two could not be; so that is not what is wrong with them.
        """
        failed = False
        for key in list(waiting):
            try:
                write(key, waiting[key])
            except HistoryError as error:
                if failed:
                    raise
                failed = True
                self._tell(error)
                continue
            except Exception as error:  # noqa: BLE001 -- one message that cannot be written must not stop the others
                self._tell(error)
            del waiting[key]

    def _tell(self, error: Exception) -> None:
        """Tell why something is not kept; the person needs that once."""
        if self._told:
            return
        self._told = True
        known = isinstance(error, HistoryError)
        with contextlib.suppress(Exception):  # whoever is told may be gone
            self._on_error(str(error) if known else f"it cannot be written ({type(error).__name__}: {error})")
