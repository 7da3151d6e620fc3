"""Runs a reader in a child process, which is killed if an input takes too much time or memory."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fuzz.worker import BEAT_BYTES, DEFECT, RAISED, READY

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.05
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LAST = 40
"""Lines that are kept of what a process said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an input may take."""

    seconds: float = 10.0
    """Time of one; time in which other processes had the processor does not count."""
    bytes: int = 1 << 30
    """Memory of the process beyond what it has when its reader is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a reader's trial."""

    tried: int
    """Number of inputs."""
    grown: int
    """Bytes by which the process grew at most."""
    defect: str | None
    """What is wrong, in a line; None: nothing."""
    said: str
    """What the process said, a traceback for the most part."""
    input: Path | None
    """The input at fault."""


def watch(
    name: str, *, start: int, seconds: float, keep: Path, limits: Limits | None = None, given: Path | None = None
) -> Outcome:
    """Try a reader.

    Args:
        name: See `opener`.
        start: Seed.
        seconds: How long.
        keep: Folder for an input at fault.
        limits: What an input may take.
        given: Only this input.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder)
        (work / "beat").write_bytes(bytes(BEAT_BYTES))
        arguments = [name, folder, str(start), str(seconds), *([str(given)] if given else [])]
        command = [sys.executable, "-m", "tests.fuzz.worker", *arguments]
        pipe = subprocess.PIPE
        with (
            (work / "said").open("wb") as said,
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, cwd=ROOT, text=True) as child,
        ):
            trial = _Trial(child, work, limits or Limits())
            defect = trial.defect()
        told = (work / "said").read_text(errors="replace")
        if defect is None and child.returncode == DEFECT:
            defect = (work / RAISED).read_text()
        elif defect is None and child.returncode:
            defect = f"the process ended with status {child.returncode}"
        elif defect is None and (found := _OBEYED.search(told)):
            defect = f"it printed {found[0]!a}, which a terminal obeys"
        kept = keep / "-".join((*re.findall(r"\w+", name), str(start)))
        if defect is not None and (work / "input").exists():
            keep.mkdir(parents=True, exist_ok=True)
            kept.write_bytes((work / "input").read_bytes())
        return Outcome(
            tried=(trial.beats() + 1) // 2,
            grown=trial.grown,
            defect=defect,
            said="\n".join(told.splitlines()[-_LAST:]),
            input=kept if kept.exists() else None,
        )


class _Trial:
    """A process that tries a reader."""

    def __init__(self, child: subprocess.Popen[str], work: Path, limits: Limits) -> None:
        self._child = child
        self._work = work
        self._limits = limits
        self.grown = 0

    def beats(self) -> int:
        """How many inputs were begun and ended; odd while one is being read."""
        return int.from_bytes((self._work / "beat").read_bytes(), "little")

    def defect(self) -> str | None:
        """Wait for the end of the process, or end it where an input takes too much."""
        child, limits = self._child, self._limits
        assert child.stdout is not None, "it was started with a pipe"
        assert child.stdin is not None, "it was started with a pipe"
        if child.stdout.readline().strip() != READY:
            return "what is sound is not read"
        begin = self._memory()
        child.stdin.close()
        beats, since = 0, self._time()
        while child.poll() is None:
            time.sleep(LOOK_S)
            self.grown = max(self.grown, self._memory() - begin)
            if self.grown > limits.bytes:
                child.kill()
                return f"more than {limits.bytes >> 20:,} MiB of memory"
            if (now := self.beats()) != beats:
                beats, since = now, self._time()
            elif beats % 2 and self._time() - since > limits.seconds:
                child.send_signal(signal.SIGABRT)
                return f"more than {limits.seconds:g} s"
        return None

    def _memory(self) -> int:
        """The most bytes that the process ever held, where the system tells, else what it holds."""
        if found := re.search(r"VmHWM:\s+(\d+) kB", self._told("status")):
            return int(found[1]) * 1024
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self._child.pid).memory_info().rss)
        return 0

    def _time(self) -> float:
        """A clock in seconds that stands still while the process waits for a processor, where the system tells that."""
        told = self._told("schedstat").split()
        return time.monotonic() - (int(told[1]) / 1e9 if len(told) == 3 else 0.0)

    def _told(self, what: str) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._child.pid}/{what}").read_text()
        return ""
