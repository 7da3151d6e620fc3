"""Parallel compilation of units in child processes, since Python's part of compiling holds the interpreter's lock.

A process reads one unit per line on its standard input and answers each with a line. If it cannot be started or dies,
its units are compiled later, when their addresses are needed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.digest import extent
from runtime.backends.cpu.machine.unit import Unit
from runtime.system.child import child_command

logger = logging.getLogger(__name__)

_MAX_PROCESSES: Final = 8
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
    missing = [unit for unit in units if not unit.is_compiled]
    waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in missing:
        waiting.put(unit)

    def work(worker: subprocess.Popen[str]) -> None:
        with worker:
            _feed(worker, waiting, queue.SimpleQueue())

    for _ in range(min(len(missing), _MAX_PROCESSES, _cores())):
        if worker := _start(nice=_BACKGROUND_NICE):
            atexit.register(worker.kill)
            threading.Thread(target=work, args=(worker,), name="compile", daemon=True).start()


def _compiled(missing: Sequence[Unit]) -> Iterator[Unit]:
    """Compile in child processes; yields every unit once, as soon as it was tried."""
    count = min(len(missing), _MAX_PROCESSES, _cores())
    if count < 2:
        yield from missing
        return
    waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    tried: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for unit in missing:
        waiting.put(unit)
    workers = [worker for worker in (_start() for _ in range(count)) if worker is not None]
    feeders = [threading.Thread(target=_feed, args=(worker, waiting, tried)) for worker in workers]
    try:
        for feeder in feeders:
            feeder.start()
        for _ in missing:
            yield tried.get() if workers else waiting.get()
    finally:
        for worker in workers:
            worker.kill()
        for feeder in feeders:
            feeder.join()
        for worker in workers:
            with contextlib.suppress(OSError), worker:
                pass  # closes its pipes and waits for it to end


def _cores() -> int:
    """Cores available to this process."""
    process = psutil.Process()
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1


def _start(nice: int = 0) -> subprocess.Popen[str] | None:
    """Start a compiler process; None if impossible."""
    settings = {"NUMBA_OPT": "0", "LOWBIT_CHAT_CPU_VARIANT": isa.VARIANT}
    settings |= {"LOWBIT_CHAT_KERNEL_CACHE": str(isa.KERNEL_CACHE.parent)}  # if that is temporary, share it
    try:
        return subprocess.Popen(
            child_command(__spec__.name, str(isa.KERNEL_CACHE), str(nice)),
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        logger.debug("no process could be started to compile kernels: %s", error)
        return None


def _feed(worker: subprocess.Popen[str], waiting: queue.SimpleQueue[Unit], tried: queue.SimpleQueue[Unit]) -> None:
    """Feed a process one unit at a time."""
    assert worker.stdin is not None, "it was started with a pipe"
    assert worker.stdout is not None, "it was started with a pipe"
    while True:
        try:
            unit = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            worker.stdin.write(f"{unit.module} {unit.name}\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except (OSError, ValueError) as error:
            answer = str(error)
        if answer != "done\n":
            logger.debug("a process could not compile %s: %s", unit.name, answer)
        tried.put(unit)


def serve(folder: str, nice: int) -> None:
    """Main function of a compiler process: compile the units named on standard input.

    Args:
        folder: Where machine code is kept.
        nice: Niceness, on systems that have it.
    """
    if nice and hasattr(os, "nice"):
        os.nice(nice)
    isa.KERNEL_CACHE = Path(folder)  # another may have been chosen if the usual one is unusable
    for line in sys.stdin:
        module, name = line.split()
        try:
            unit = getattr(importlib.import_module(module), name)
            unit.keep()
            answer = "done"
        except Exception as error:  # noqa: BLE001  # the requester tries again and reports the error
            answer = " ".join(str(error).split()) or type(error).__name__
        print(answer, flush=True)  # noqa: T201  # the protocol with the parent


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
