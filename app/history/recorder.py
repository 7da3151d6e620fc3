"""Keeps a conversation while it goes on. A thread writes what changed, so that the screen never waits for a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from app.conversation import Extras, Message
from app.errors import HistoryError
from app.history.store import History

INTERVAL_S = 0.5
"""Between two writes, so that at most so much of an answer is lost when the program is killed."""


class Recorder:
    """Writes messages to a history. `close` writes what is left.

    Args:
        path: The history's file; opened by the thread, when there is something to write.
        on_error: Told, by the thread and once, why chats are not kept.
    """

    def __init__(self, path: Path, on_error: Callable[[str], object]) -> None:
        self._path, self._on_error = path, on_error
        self._waiting: dict[tuple[str, str], tuple[str | None, Message]] = {}
        self._notes: dict[str, tuple[str | None, Extras]] = {}
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
            self._changed.wait_for(lambda: not (self._due or self._writing))
            self._hurry = False

    def close(self) -> None:
        """Write what is left, and end the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        history: History | None = None
        try:
            history = History(self._path)
            while self._write(history):
                pass
        except HistoryError as error:
            with self._changed:
                self._closed, self._writing = True, False
                self._waiting.clear()
                self._notes.clear()
                self._changed.notify_all()
            self._on_error(str(error))
        finally:
            if history is not None:
                history.close()

    def _write(self, history: History) -> bool:
        """Write what waits; whether there may be more to come."""
        with self._changed:
            while not (self._due or self._closed):
                self._changed.wait()
            waiting, self._waiting = self._waiting, {}
            notes, self._notes = self._notes, {}
            self._writing = True
        for chat in dict.fromkeys(chat for chat, _ in waiting):
            own = [value for (other, _), value in waiting.items() if other == chat]
            history.record(chat, own[-1][0], [message for _, message in own])
        for chat, (head, extras) in notes.items():
            history.note(chat, head, extras)
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._hurry, INTERVAL_S)
            return self._due or not self._closed
