"""Pulls in child processes and kills them: for each line of JSON a child is forked, which calls `pull`.

A fork of a process that has imported everything starts in milliseconds, so a kill hits the download, not the imports.
The line has the arguments of `pull` and `kill_after_s` (or null); the answer is the exit status, as of `subprocess`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import httpx  # noqa: F401 — imported before the first fork, as the rest
import huggingface_hub.utils  # noqa: F401

from models.hub import Policy, pull

POLL_S = 0.002


def child(arguments: dict[str, Any]) -> None:
    code = 1
    try:
        pull(**arguments, policy=Policy(first_delay_s=0.05, longest_delay_s=0.2))
        code = 0
    except BaseException:  # noqa: BLE001 — whatever it is, the test sees it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def outcome(pid: int, kill_after_s: float | None) -> int:
    end = time.monotonic() + (float("inf") if kill_after_s is None else kill_after_s)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(POLL_S)


def main() -> None:
    for line in sys.stdin:
        arguments = json.loads(line)
        kill_after_s = arguments.pop("kill_after_s")
        pid = os.fork()
        if pid == 0:
            child(arguments)
        sys.stdout.write(f"{outcome(pid, kill_after_s)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
