"""A child process of this program that answers requests on its standard output, one JSON value a line.

What no check in the same process could interrupt, such as a single operation in C, runs in a `LimitedProcess`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runtime.system.child import child_command

_END_S = 1.0
_LONGEST_ERROR = 300


def limit_memory(most: int) -> None:
    """Let this process allocate no more memory, where the system supports such a limit.

    Args:
        most: Bytes of address space.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit, macOS refuses it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def most_files() -> int | None:
    """Files and connections that this process may have open at once; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most


class ChildProcess:
    """Runs a module; started when first needed, and again after it ended. For one thread at a time, except `kill`."""

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


class LimitedProcess:
    """A child process that ends when a request takes too long or too much memory; the next request starts it again.

    Args:
        module: Dotted name of a module that calls `serve`.
        seconds: Time limit of a request.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._child = ChildProcess(module, str(seconds))

    def start(self) -> None:
        """Start the process unless it is running; it gets ready in the background."""
        with self._lock, contextlib.suppress(OSError):
            self._child.start()

    def ask(self, request: Any) -> dict[str, Any] | None:
        """What the process answers: `said`, or an `error` in words; None if it was stopped.

        Raises:
            OSError: it can't be started.
            RecursionError: the request is nested too deeply.
        """
        line, answer = json.dumps(request).encode(), None
        with self._lock:
            try:
                answer = next(self._child.lines(line), None)
            finally:
                if answer is None:  # if it was interrupted, its answer would be taken for that of the next request
                    self._child.close()
        parsed: dict[str, Any] | None = None if answer is None else json.loads(answer)
        return parsed

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._lock:
            self._child.close()


def serve(answer: Callable[[bytes], Any], *, memory: int) -> None:
    """Answer requests on standard input, one JSON value a line, until it is closed; the process of a `LimitedProcess`.

    Args:
        answer: Returns what is said to a line; what it raises is the error.
        memory: Limit in bytes, where the system supports one.
    """
    seconds = float(sys.argv[1])
    limit_memory(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for line in sys.stdin.buffer:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            sys.stdout.buffer.write(_answered(answer, line))
            sys.stdout.buffer.flush()
            faulthandler.cancel_dump_traceback_later()


def _answered(answer: Callable[[bytes], Any], line: bytes) -> bytes:
    try:
        return json.dumps({"said": answer(line)}).encode() + b"\n"
    except MemoryError:
        return b'{"error": "it needs too much memory"}\n'
    except RecursionError:
        return b'{"error": "it is nested too deeply"}\n'
    except Exception as error:  # noqa: BLE001  # what is read there may raise anything
        return json.dumps({"error": str(error)[:_LONGEST_ERROR] or repr(error)}).encode() + b"\n"
