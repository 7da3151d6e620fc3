"""Parts in separate processes, each with a watchdog: a hanging part is killed with its children, and recorded.

A part writes its rows to a file as it goes; whoever runs it takes them over into the report. A part's process ends when
the one that started it does, however that goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[3]
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_ERROR_LINES = 3

Entry = dict[str, Any]
"""What is known of a part: seconds, rows, error (None = it ended well)."""


class Child:
    """A command in a session of its own.

    Args:
        command: Program and arguments.
        seconds: When it is killed.
        environment: Its variables.
        folder: Where what it says is kept.
    """

    running: ClassVar[set[Child]] = set()
    """Those that run now, for whoever is told to stop."""

    def __init__(self, command: Sequence[str], seconds: float, environment: dict[str, str], folder: Path) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        self.stopped = False
        """Whether it was killed because its time was over."""
        self._said, self._errors = folder / "said.txt", folder / "errors.txt"
        with self._said.open("w") as said, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                start_new_session=True,
            )
        Child.running.add(self)

    def wait(self, each: Callable[[], object] = lambda: None) -> str | None:
        """Wait for its end, calling `each` now and then. Returns what went wrong, or None."""
        try:
            while self._process.poll() is None:
                each()
                if self.seconds > self._seconds:
                    self.stopped = True
                    self.kill()
                    return f"still busy after {self.seconds:.0f} seconds, and stopped"
                time.sleep(_POLL_S)
        finally:
            self.kill()
            Child.running.discard(self)
            self.took = round(self.seconds, 1)
        if not self._process.returncode:
            return None
        lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {self._process.returncode}: {' | '.join(lines[-_ERROR_LINES:])}"

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self._began

    @property
    def output(self) -> str:
        """What it has said."""
        return self._said.read_text(errors="replace")

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_parts(
    module: str,
    parts: Sequence[str],
    seconds: float,
    *,
    dry: bool,
    each: Callable[[dict[str, Entry]], object],
    beside: int = 1,
) -> None:
    """Run some parts in one process, one after another.

    Args:
        module: `tests.bench.first_light`, whose command line takes `--part`.
        parts: Their names.
        seconds: When the process is killed.
        dry: Whether to run them on the CPU.
        each: Is given what is known of these parts, now and then and in the end.
        beside: Processes that share the processor, this one included.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // beside))} if beside > 1 else {}
    environment = threads | dict(os.environ) | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", module, "--part", ",".join(parts), "--out", name, *(["--dry"] * dry)]
        command += ["--parent", str(os.getpid()), "--seconds", str(seconds)]
        child = Child(command, seconds, environment, folder)

        def known(error: str | None) -> dict[str, Entry]:
            found = {}
            for part in parts:
                file, ended = folder / f"{part}.json", (folder / f"{part}.ended").is_file()
                rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
                found[part] = {"seconds": round(child.seconds, 1), "rows": rows, "error": None if ended else error}
            return found

        error = child.wait(lambda: each(known("not ended yet")))
        each(known(error))


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends (Linux).

    Raises:
        SystemExit: it has ended already.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that started this part has ended")


def stop_with_children() -> None:
    """Take the running parts along when this process is asked to end."""

    def stop(number: int, _frame: object) -> None:
        for child in tuple(Child.running):
            child.kill()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
