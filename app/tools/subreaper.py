"""Subreaper: runs a server's program and ends all that it started: `python subreaper.py LEASH END_S COMMAND ...`.

On Linux orphans become this process's children, so that what left the group and the session is found too; elsewhere
the program's group is ended. That happens when the program ends, and when the other end of LEASH closes: when the
parent wants it, or is gone, however it went. A file of its own without imports from this program, to be ready at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36


def main(leash: int, end_s: float, command: list[str]) -> int:
    """Run a program.

    Args:
        leash: Descriptor of a socket; gets 0 when the program runs, or the number of the error.
        end_s: Seconds for what is left to end after SIGTERM.
        command: The program and its arguments.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        program = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        os.write(leash, str(error.errno).encode())
        return 127
    os.write(leash, b"0")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # the program's pipes close when the program closes them
        os.dup2(nothing, descriptor)
    while not _reaped(program.pid) and leash not in select.select([leash, woken], [], [])[0]:
        os.read(woken, 512)
    for number in (signal.SIGTERM, signal.SIGKILL):
        asked, until = set[int](), time.monotonic() + end_s
        while (left := _left(program.pid)) and time.monotonic() < until:
            for one in left if number == signal.SIGKILL else left - asked:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(one, number)
            asked |= left
            time.sleep(0.01)
            _reaped(program.pid)
    return 0


def _reaped(program: int) -> bool:
    """Take leave of the children that have ended. Returns whether the program is among them."""
    ended = False
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended |= pid == program
    return ended


def _left(program: int) -> set[int]:
    """What runs of all that the program started; negative: a group."""
    if sys.platform != "linux":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program, 0)
            return {-program}
        return set()
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(file.parent.name)] = int(parent)
    found, new = set[int](), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
