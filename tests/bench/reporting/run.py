"""Metadata of a report's run: command, day, machine, versions; and a log line for each step."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.bench.reporting.origin import ROOMS, stamp

_PLACES = ("--peer-python", "--results", "--out")
Tell = Callable[[str], None]
"""Receives a line for each thing done."""


def teller(begin: float) -> Tell:
    """A printer of lines with the seconds since `begin`, a time of `time.monotonic`."""

    def tell(line: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)

    return tell


def about_run(program: str, rooms: Sequence[str] = ROOMS) -> dict[str, Any]:
    """Command line, day, processor, threads, instruction set, versions and code, as a JSON object.

    Args:
        program: How the program is started, without its arguments.
        rooms: Folders of the repository whose code decides the numbers.
    """
    from runtime.backends.cpu.machine.isa import VARIANT
    from runtime.backends.cpu.pool import default_threads
    from tuner.detect import detect_cpu

    return {
        "command": " ".join([program, *shown(sys.argv[1:])]),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "cpu": detect_cpu().name,
        "threads": default_threads(),
        "variant": VARIANT,
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "torch", "numba")},
        **stamp(rooms),
    }


def shown(arguments: Sequence[str]) -> list[str]:
    """The command line without places of this machine: absolute paths, and what is written where."""
    shown, hidden = [], False
    for word in arguments:
        name, equals, value = word.rpartition("=")
        place = hidden or value.startswith("/")
        shown.append(f"{name}{equals}PATH" if place or name in _PLACES else word)
        hidden = word in _PLACES
    return shown
