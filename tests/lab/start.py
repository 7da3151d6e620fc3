"""Start-up times: the first answer with nothing compiled, later ones, --help, the terminal UI.

    python -m tests.lab.start --out FILE.json --beside before=OTHER/bin/lowbit-chat

Every measurement is a process of its own, from its start to the last word of the answer (or to the frame in which the
chat screen's input stands). Programs take turns; medians and all seconds are written down. `cold` has an empty home and
no compiled kernels, and includes compiling and tuning, but for what follows the answer; `warm` has both. Python's own
bytecode is there in all of them, as after an installation: a first round, which is not counted, writes it. Processor
seconds are those of the process and its children, to their end.
"""

from __future__ import annotations

import importlib.metadata
import os
import pty
import re
import resource
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.store import ROOMS, about_run, columns, parser, write

PAINTED = "Ask anything"
"""What the input of the chat screen shows while it is empty."""
PATIENCE_S = 120.0
_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
_QUIT = b"\x11"
_VERSIONS = ("lowbit-chat", "numba", "llvmlite", "numpy", "tokenizers", "textual", "typer")


class Program:
    """One installation of the program, with a home of its own.

    Args:
        name: What rows call it.
        path: Its executable.
        folder: Where its homes are made.
    """

    def __init__(self, name: str, path: Path, folder: Path) -> None:
        self.name, self.path, self._folder, self._bytecode = name, path, folder / name, folder / "bytecode"
        self.seconds: dict[str, list[float]] = {}
        self.processor_seconds: dict[str, list[float]] = {}

    def environment(self) -> dict[str, str]:
        """Environment with the program's home and kernels."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return own | {
            "LOWBIT_CHAT_HOME": str(self._folder / "home"),
            "LOWBIT_CHAT_KERNEL_CACHE": str(self._folder / "kernels"),
            "PYTHONPYCACHEPREFIX": str(self._bytecode),
            "TERM": "xterm-256color",
        }

    def forget(self) -> None:
        """Leave nothing of earlier starts."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def measure(self, what: str, work: Callable[[], float]) -> None:
        """Note what `work` took."""
        before = _children_s()
        self.seconds.setdefault(what, []).append(work())
        self.processor_seconds.setdefault(what, []).append(_children_s() - before)

    def answer(self) -> float:
        """Seconds of `run demo hello`."""
        return self._run("run", "demo", "hello")

    def help(self) -> float:
        """Seconds of `--help`."""
        return self._run("--help")

    def paint(self) -> float:
        """Seconds until the terminal UI's chat screen is drawn on a terminal of 100 x 30."""
        began = time.perf_counter()
        child, terminal = pty.fork()
        if child == 0:
            os.execve(str(self.path), [str(self.path)], self.environment() | {"LINES": "30", "COLUMNS": "100"})
        try:
            until(terminal, PAINTED, PATIENCE_S)
            took = time.perf_counter() - began
        finally:
            _end(child, terminal)
        return took

    def _run(self, *arguments: str) -> float:
        began = last = time.perf_counter()
        program = subprocess.Popen(
            [self.path, *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        patience = threading.Timer(PATIENCE_S, program.kill)
        patience.start()
        try:
            assert program.stdout is not None
            while os.read(program.stdout.fileno(), 1 << 16):
                last = time.perf_counter()
            program.wait()
        finally:
            patience.cancel()
        if program.returncode:
            raise RuntimeError(f"{' '.join(map(str, program.args))} ended with {program.returncode}")
        return last - began


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def until(terminal: int, text: str, patience_s: float) -> float:
    """Read a terminal until it was sent a text, whatever escapes are in it (never, if that is empty); seconds.

    Raises:
        TimeoutError: It was not.
    """
    began, seen = time.perf_counter(), b""
    while (left := began + patience_s - time.perf_counter()) > 0:
        if select.select([terminal], [], [], left)[0]:
            seen += os.read(terminal, 1 << 16)
            if text and text.encode() in _ESCAPES.sub(b"", seen):
                return time.perf_counter() - began
    if text:
        raise TimeoutError(f"{text!r} was not shown within {patience_s:g} s")
    return patience_s


def _end(child: int, terminal: int) -> None:
    """Quit the program, and wait until it and what it started have gone."""
    os.write(terminal, _QUIT)
    deadline = time.perf_counter() + 10
    while time.perf_counter() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                os.read(terminal, 1 << 16)
            except OSError:
                break
        if os.waitpid(child, os.WNOHANG)[0]:
            os.close(terminal)
            return
    os.close(terminal)
    os.waitpid(child, 0)


def report(programs: list[Program]) -> dict[str, Any]:
    """What was measured, on what."""
    return {
        **about_run("python -m tests.lab.start", ("app", *ROOMS)),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
        "rows": [
            {
                "program": program.name,
                "what": what,
                "median_s": round(statistics.median(seconds), 3),
                "median_processor_s": round(statistics.median(program.processor_seconds[what]), 3),
                "seconds": [round(second, 3) for second in seconds],
            }
            for program in programs
            for what, seconds in program.seconds.items()
        ],
    }


def main() -> None:
    """Measure and write."""
    options = parser(__doc__, "start")
    options.add_argument("--beside", action="append", default=[], metavar="NAME=PROGRAM", help="another installation")
    options.add_argument("--cold", type=int, default=3, help="cold starts of each program")
    options.add_argument("--warm", type=int, default=9, help="warm starts, helps and paints of each program")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(sys.executable).with_name("lowbit-chat")
        named = [("now", own), *((name, Path(path)) for name, path in (own.split("=", 1) for own in asked.beside))]
        programs = [Program(name, path.absolute(), Path(folder)) for name, path in named]
        for program in programs:
            program.forget()
            for rehearsed in (program.answer, program.answer, program.paint):
                rehearsed()
        for _ in range(asked.cold):
            for program in programs:
                program.forget()
                program.measure("cold", program.answer)
        for _ in range(asked.warm):
            for program in programs:
                program.measure("warm", program.answer)
                program.measure("help", program.help)
                program.measure("paint", program.paint)
    found = report(programs)
    write(asked.out, found)
    print(columns(found["rows"]))


if __name__ == "__main__":
    main()
