"""A child process of this program that answers requests on its standard output, one JSON value a line."""

from __future__ import annotations

import atexit
import contextlib
import subprocess
from collections.abc import Iterator

from runtime.system.child import child_command

_END_S = 1.0


class ChildProcess:
    """Runs a module; started when first needed, and again after it ended. For one thread at a time, except `kill`.

    Args:
        module: Dotted name; see `child_command`.
        arguments: Its arguments.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = child_command(module, *arguments)
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = False
        """Whether it was killed or closed its output, so that it will end although it may still be there."""

    def start(self) -> None:
        """Start it unless it is running; it gets ready in the background.

        Raises:
            OSError: it can't be started.
        """
        self._running()

    def lines(self, request: bytes) -> Iterator[bytes]:
        """Send a request, and return the lines of its answer. They end when the process does.

        Args:
            request: One line, without its end.

        Raises:
            OSError: it can't be started.
        """
        child = self._running()
        assert child.stdin is not None, "it was started with a pipe"
        assert child.stdout is not None, "it was started with a pipe"
        try:
            child.stdin.write(request + b"\n")
            child.stdin.flush()
        except OSError:
            self._ending = True
            return
        while (line := child.stdout.readline()).endswith(b"\n"):
            yield line
        self._ending = True

    def kill(self) -> None:
        """Kill the process, from any thread. Safe to call twice."""
        if (child := self._child) is not None:
            self._ending = True
            child.kill()

    def close(self) -> None:
        """Close the pipes, which ends the process; kill it if it does not end. Safe to call twice."""
        child, self._child = self._child, None
        if child is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError), child:  # unwritten data has no reader left
            assert child.stdin is not None, "it was started with a pipe"
            try:
                child.stdin.close()
                child.wait(_END_S)
            except (OSError, subprocess.TimeoutExpired):
                child.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._ending or self._child.poll() is not None:
            self.close()
            self._ending = False
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            atexit.register(self.close)
        return self._child
