"""A process on a terminal of its own."""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class PseudoTerminal:
    """It has no size, as a serial line, and the environment doesn't tell one either."""

    def __init__(self, *command: str, **environment: str) -> None:
        import pty

        self.leader, self.follower = pty.openpty()
        usual = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=self.follower, stdout=self.follower, stderr=self.follower, start_new_session=True, cwd=ROOT,
            env={**usual, "TERM": "xterm", **environment},
        )  # fmt: skip
        self.seen = ""
        """All that was read so far."""
        self._at = 0

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def read(self, wait_s: float) -> bool:
        """Read what is shown next. Returns whether anything is, within some seconds."""
        ready, _, _ = select.select([self.leader], [], [], max(0.0, wait_s))
        if ready:
            self.seen += os.read(self.leader, 65536).decode(errors="replace")
        return bool(ready)

    def until(self, *texts: str) -> None:
        """Read until texts were shown after what was waited for before."""
        end = time.monotonic() + PATIENCE_S
        while missing := [text for text in texts if text not in self.seen[self._at :]]:
            assert self.read(end - time.monotonic()), f"{missing} was not shown: {self.seen!r}"
        self._at = max(self.seen.index(text, self._at) + len(text) for text in texts)

    def quiet(self) -> None:
        """Read until nothing more is shown, and wait for none of it any more."""
        while self.read(0.2):
            pass
        self._at = len(self.seen)

    def ended(self) -> int:
        """Read until the process has ended. Returns its exit status."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self.read(0.1)
            assert time.monotonic() < end, f"it did not end: {self.seen!r}"
        self.quiet()
        return self.process.returncode

    def close(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.wait()
        for side in (self.leader, self.follower):
            if side >= 0:
                os.close(side)

    def hang_up(self) -> None:
        """Close the terminal while the process runs."""
        os.close(self.follower)
        os.close(self.leader)
        self.leader = self.follower = -1
