"""Recorder: saves conversations in a background thread, so that the screen never waits for a disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.conversation import Extras, Message
from app.errors import HistoryError
from app.history.store import History
from app.language import _

INTERVAL_S = 0.5
"""Seconds between two writes: the most of an answer that is lost when the program is killed."""
FLUSH_S = 30.0
"""Longest wait in seconds for a disk, or for another program that has locked the file."""
K = TypeVar("K")
V = TypeVar("V")
Messages = dict[tuple[str, str], tuple[str | None, Message]]
Notes = dict[str, tuple[str | None, Extras]]


class Recorder:
    """Writes messages to a history. `close` writes the rest.

    A failed write is reported once, and retried with the next one.

    Args:
        path: The history's file; opened by the thread on the first write.
        on_error: Called once by the thread, with the reason why chats are not saved.
    """

    def __init__(self, path: Path, on_error: Callable[[str], object]) -> None:
        self._path, self._on_error = path, on_error
        self._history: History | None = None
        self._waiting: Messages = {}
        self._notes: Notes = {}
        self._stuck: tuple[Messages, Notes] = {}, {}  # failed writes; used by the thread only
        self._told = False
        self._changed = threading.Condition()
        self._closed = False
        self._hurry = False
        self._writing = False
        self._thread: threading.Thread | None = None

    def record(self, chat: str, head: str | None, message: Message) -> None:
        """Save a new or changed message soon."""
        with self._changed:
            if self._closed:
                return
            idle = not self._due  # otherwise the thread knows already, and need not wake for every word
            self._waiting[chat, message.id] = (head, message)
            self._wake(idle=idle)

    def note(self, chat: str, head: str | None, extras: Extras) -> None:
        """Save a chat's head and extras soon."""
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
        """Wake the thread; the lock must be held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="history", daemon=True)
            self._thread.start()
        if idle:
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything recorded is written, or has failed."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._due or self._writing), FLUSH_S)
            self._hurry = False

    def close(self) -> None:
        """Write the rest, and end the thread. Safe to call twice."""
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
        """Write what is waiting. Returns whether there may be more."""
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
        """Write failed and waiting items. What the file refuses is retried later; invalid items are dropped."""
        messages, others = self._stuck = self._stuck[0] | waiting, self._stuck[1] | notes
        try:
            history = self._history = self._history or History(self._path)
            self._each(messages, lambda key, kept: history.record(key[0], kept[0], [kept[1]]))
            self._each(others, lambda chat, kept: history.note(chat, *kept))
        except Exception as error:  # noqa: BLE001 -- the thread must survive, or nothing is saved any more
            self._tell(error)

    def _each(self, waiting: dict[K, V], write: Callable[[K, V], None]) -> None:
        """Write items one by one, removing those written.

        Raises:
            HistoryError: two failed, so the items are not the cause.
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
            except Exception as error:  # noqa: BLE001 -- one invalid message must not stop the others
                self._tell(error)
            del waiting[key]

    def _tell(self, error: Exception) -> None:
        """Report once why something is not saved."""
        if self._told:
            return
        self._told = True
        known = isinstance(error, HistoryError)
        with contextlib.suppress(Exception):  # the receiver may be gone
            self._on_error(
                str(error)
                if known
                else _("it cannot be written ({name}: {error})", name=type(error).__name__, error=error)
            )
