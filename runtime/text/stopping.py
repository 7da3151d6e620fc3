"""Stop strings in streamed text: no part of one is ever emitted, however the text is split into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through, holds back a possible beginning of a stop string, and ends at the first complete one.

    The first stop string is the one whose match begins first; the text after it is dropped. The output does not depend
    on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for stop strings; empty ones are ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; all further text is dropped."""

    def add(self, text: str) -> str:
        """Add text, and return what can be emitted."""
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
        """The held-back text, once the input has ended without a stop string."""
        begin = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        given, self._held = self._held if begin < 0 else self._held[:begin], ""
        self.stopped = self.stopped or begin >= 0
        return given

    def _earliest_beginning(self) -> int:
        """Position of a possible beginning of a stop string in the held-back text; its length if there is none."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(self._held)
