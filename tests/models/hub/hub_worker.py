"""Pulls in child processes and kills them: for each line of JSON a child is forked, which calls `pull`.

A fork of a process that has imported everything starts in milliseconds, so a kill hits the download, not the imports.
The line has the arguments of `pull` and under `kill` when to kill the child: after `seconds`, when a file `exists`,
or when so many `bytes` are in the cache. The answer is the exit status, as of `subprocess`. A first line says that
everything is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
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


def due(kill: dict[str, Any], cache_dir: str, elapsed_s: float) -> bool:
    if "exists" in kill:
        return Path(kill["exists"]).exists()
    if "bytes" in kill:
        return sum(path.stat().st_size for path in Path(cache_dir).glob("*/blobs/*")) >= kill["bytes"]
    return "seconds" in kill and elapsed_s >= kill["seconds"]


def outcome(pid: int, kill: dict[str, Any], cache_dir: str) -> int:
    begin = time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            with suppress(FileNotFoundError):  # a file may get its final name between being listed and being measured
                if due(kill, cache_dir, time.monotonic() - begin):
                    os.kill(pid, signal.SIGKILL)
                    _, status = os.waitpid(pid, 0)
                    ended = pid
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)


def main() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        arguments = json.loads(line)
        kill = arguments.pop("kill")
        pid = os.fork()
        if pid == 0:
            child(arguments)
        sys.stdout.write(f"{outcome(pid, kill, arguments['cache_dir'])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
