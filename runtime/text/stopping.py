"""Stop strings in a stream of text: nothing of one is ever given out, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through, holds back what may be the beginning of a stop string, and ends at the first one.

    The first stop string is the one whose match begins first; what comes after it is dropped. For any way of cutting a
    text into pieces, the text given out is the same.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for `stops`; empty strings do not count."""
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string has been met; from then on everything is dropped."""

    def add(self, text: str) -> str:
        """Take more text and return what may be given out."""
        if self.stopped:
            return ""
        self._held += text
        begin = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        waiting = self._earliest_beginning()
        if begin >= 0 and begin <= waiting:
            given, self._held, self.stopped = self._held[:begin], "", True
            return given
        given, self._held = self._held[:waiting], self._held[waiting:]
        return given

    def flush(self) -> str:
        """What is held back when the text ends without having completed a stop string."""
        begin = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        given, self._held = self._held if begin < 0 else self._held[:begin], ""
        self.stopped = self.stopped or begin >= 0
        return given

    def _earliest_beginning(self) -> int:
        """Where in the held text a stop string may have begun without having ended; its length if nowhere."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(self._held)
