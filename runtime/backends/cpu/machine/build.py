"""Parallel compilation of units in child processes, since Python's part of compiling holds the interpreter's lock.

The processes read units from one pipe, a record at a time, and write a line into another for each. A unit that none of
them compiled is compiled later, when its address is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.unit import Unit, extent
from runtime.system.child import child_command

logger = logging.getLogger(__name__)

_MAX_PROCESSES: Final = 8
_RECORD: Final = 128
"""Bytes of a record: a unit's module and name, padded with spaces."""
_LINE: Final = 4000
"""Most bytes of a line: lines of several processes do not mix."""
_BACKGROUND_NICE: Final = 10
"""Niceness of a process that compiles in the background."""

Report = Callable[[int, int], None]
"""Called with the number of compiled units, and their total."""


def build(units: Sequence[Unit], report: Report | None = None) -> None:
    """Compile the units whose machine code is missing.

    Args:
        units: Units at the top level of their modules.
        report: Called from this thread, first with 0 compiled.

    Raises:
        BackendError: one can't be compiled here.
    """
    missing = sorted({unit for unit in units if not unit.is_compiled}, key=lambda unit: -extent(unit.source))
    if not missing:
        return
    if report is not None:
        report(0, len(missing))
    for done, unit in enumerate(_compiled(missing), 1):
        if not unit.is_compiled:
            unit.prepare()
        if report is not None:
            report(done, len(missing))


def build_later(units: Sequence[Unit]) -> None:
    """Compile units in the background, in processes of low priority.

    A caller that needs a unit earlier waits for it or compiles it, and gets its errors.

    Args:
        units: As of `build`.
    """
    if any(not unit.is_compiled for unit in units):
        threading.Thread(target=_build_in_turn, args=(tuple(units),), name="compile", daemon=True).start()


_TURN = threading.Lock()
"""Held by the one call of `build_later` that compiles: every model that is opened calls it."""


def _build_in_turn(units: Sequence[Unit]) -> None:
    with _TURN:
        if missing := [unit for unit in units if not unit.is_compiled]:
            compilers = _Compilers(missing, nice=_BACKGROUND_NICE)
            atexit.register(compilers.stop)
            for _ in compilers.tried():
                pass
            compilers.stop()
            atexit.unregister(compilers.stop)


def _compiled(missing: Sequence[Unit]) -> Iterator[Unit]:
    """Compile in child processes; yields every unit once, as soon as it was tried."""
    waiting = {_named(unit): unit for unit in missing}
    if _processes(missing) > 1:
        compilers = _Compilers(missing)
        try:
            for name in compilers.tried():
                yield waiting.pop(name)
        finally:
            compilers.stop()
    yield from waiting.values()


def _processes(missing: Sequence[Unit]) -> int:
    """The number of processes that compile some units."""
    return min(len(missing), _MAX_PROCESSES, _cores())


def _cores() -> int:
    """Cores available to this process."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1


def _named(unit: Unit) -> str:
    """How a record and an answer name a unit."""
    return f"{unit.module} {unit.name}"


class _Compilers:
    """Processes that compile units.

    Args:
        missing: The units.
        nice: Niceness of the processes.
    """

    def __init__(self, missing: Sequence[Unit], nice: int = 0) -> None:
        settings = {"NUMBA_OPT": "0", "LOWBIT_CHAT_CPU_VARIANT": isa.VARIANT}
        settings |= {"LOWBIT_CHAT_KERNEL_CACHE": str(isa.KERNEL_CACHE.parent)}  # if that is temporary, share it
        (records, write), (read, answers) = os.pipe(), os.pipe()
        self._answers = os.fdopen(read, "rb")
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError), os.fdopen(write, "wb") as to, os.fdopen(records), os.fdopen(answers):
            for _ in range(_processes(missing)):
                self._processes.append(
                    subprocess.Popen(
                        child_command(__spec__.name, str(isa.KERNEL_CACHE), str(nice)),
                        env={**os.environ, **settings},
                        stdin=records,
                        stdout=answers,
                        stderr=subprocess.DEVNULL,
                    )
                )
            to.write(b"".join(_named(unit).encode().ljust(_RECORD) for unit in missing))

    def tried(self) -> Iterator[str]:
        """The units, as soon as each was tried, until all processes have ended."""
        for line in self._answers:
            name, _, trouble = line.decode().strip().partition(": ")
            if trouble:
                logger.debug("a process could not compile %s: %s", name, trouble)
            yield name

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._answers.close()


def serve(folder: str, nice: int) -> None:
    """Main function of a compiler process: compile the units that records on standard input name.

    Args:
        folder: Where machine code is kept.
        nice: Niceness, on systems that have it.
    """
    if nice and hasattr(os, "nice"):
        os.nice(nice)
    isa.KERNEL_CACHE = Path(folder)  # another may have been chosen if the usual one is unusable
    while record := os.read(sys.stdin.fileno(), _RECORD):
        name = answer = record.decode().strip()
        module, _, function = name.partition(" ")
        try:
            getattr(importlib.import_module(module), function).keep()
        except Exception as error:  # noqa: BLE001  # the requester tries again and reports the error
            answer += ": " + (" ".join(str(error).split()) or type(error).__name__)
        os.write(sys.stdout.fileno(), answer.encode()[:_LINE] + b"\n")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
