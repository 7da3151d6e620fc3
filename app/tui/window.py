"""The range of a long conversation's messages that is mounted."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 6
"""Messages mounted when a conversation is opened, before the first paint; more follow if the screen isn't full."""
STEP = 10
"""Messages mounted at once when the user scrolls to an end of the mounted range."""
MOST = 40
"""Maximum number of mounted messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A range [start, end) of `total` messages."""

    start: int
    end: int
    total: int

    @classmethod
    def at_end(cls, total: int) -> Window:
        """The newest messages."""
        return cls(start=max(0, total - FIRST), end=total, total=total)

    @property
    def roomy(self) -> bool:
        """Whether there are earlier messages that a step can mount without dropping any at the end."""
        return self.start > 0 and self.end - self.start + STEP <= MOST

    def grown(self, count: int = 1) -> Window:
        """The window after `count` messages were added at its end."""
        return Window(start=max(self.start, self.end + count - MOST), end=self.end + count, total=self.total + count)

    def earlier(self, *, keep_end: bool = False) -> Window:
        """One step towards the beginning.

        Args:
            keep_end: whether the last message stays mounted in any case, because an answer is streaming into it.
        """
        start = max(0, self.start - STEP)
        return Window(start=start, end=self.end if keep_end else min(self.end, start + MOST), total=self.total)

    def later(self) -> Window:
        """One step towards the end."""
        end = min(self.total, self.end + STEP)
        return Window(start=max(self.start, end - MOST), end=end, total=self.total)
