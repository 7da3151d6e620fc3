"""The child process of a reader: `python -m tests.fuzz.worker READER WORK SEED SECONDS [INPUT]`.

Every input lies in WORK/input before it is read, so that it is there whatever becomes of the process. WORK/beat counts
beginnings and ends, so it is odd while an input is being read; whoever started the process looks at how long that is.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from tests.fuzz.reader import Reader, attempt, fuzz, opener

BATCH, BATCHES = 100, 5
"""Inputs between two looks at the clock, and how many times as many a process tries: hypothesis remembers inputs, and
large ones add up."""
START_S = 300.0
"""Longest time until a reader is ready."""
BEAT_BYTES = 8
READY = "ready"
DEFECT = 3
"""Exit status where a reader raised what is no refusal."""
RAISED = "raised"
"""File in WORK that then says what was raised, in a line."""


def main(name: str, work: Path, start: int, seconds: float, given: Path | None) -> int:
    """Try a reader until the time is up. Prints READY once it has read what is sound, and waits for standard input."""
    faulthandler.enable()  # who ends the process with SIGABRT sees where it is
    faulthandler.dump_traceback_later(START_S, exit=True)
    (work / "files").mkdir()
    with (
        opener(name)(work / "files") as reader,
        (work / "beat").open("r+b") as file,
        mmap.mmap(file.fileno(), BEAT_BYTES) as beat,
    ):
        for content in reader.sound:
            reader.read(content)
        faulthandler.cancel_dump_traceback_later()
        print(READY, flush=True)
        sys.stdin.readline()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is kept too
        beats = 0

        def count() -> None:
            nonlocal beats
            beats += 1
            beat[:] = beats.to_bytes(BEAT_BYTES, "little")

        def read(content: bytes) -> None:
            (work / "input").write_bytes(content)
            count()
            try:
                reader.read(content)
            finally:
                count()

        try:
            _try(replace(reader, read=read), start, time.monotonic() + seconds, given)
        except Exception as error:  # noqa: BLE001  # any is a defect
            traceback.print_exc()
            (work / RAISED).write_text(traceback.format_exception_only(error)[0].strip()[:300])
            return DEFECT
    return 0


def _try(reader: Reader, start: int, until: float, given: Path | None) -> None:
    if given is not None:
        attempt(reader, given.read_bytes())
        return
    for batch in range(BATCHES):
        if time.monotonic() < until:
            fuzz(reader, start=start + batch, count=BATCH)


if __name__ == "__main__":
    name, work, start, seconds, *given = sys.argv[1:]
    sys.exit(main(name, Path(work), int(start), float(seconds), Path(given[0]) if given else None))
