"""Fuzzes every reader of files, requests and answers: `python -m tests.fuzz [READER ...]`.

A reader must answer each input with what it read or with an error of the program's own, within 10 s and 1 GiB.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.reader import READERS
from tests.fuzz.watch import watch
from tests.fuzz.worker import BATCHES


def main(arguments: Sequence[str] | None = None) -> int:
    """Try readers one after the other. Returns 1 where one has a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"{', '.join(READERS)} (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each reader (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="the same inputs again (default: others every time)")
    parser.add_argument("--keep", type=Path, default=None, help="folder for inputs at fault (default: a temporary one)")
    parser.add_argument("--input", type=Path, default=None, help="only this input, for a single reader")
    asked = parser.parse_args(arguments)
    names = asked.readers or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        parser.error(f"there is no reader {unknown[0]}; there are: {', '.join(READERS)}")
    if asked.input is not None and len(names) > 1:
        parser.error("--input is for a single reader: name it")
    start = secrets.randbelow(1 << 32) if asked.seed is None else asked.seed
    keep = asked.keep or Path(tempfile.mkdtemp(prefix="fuzz-inputs-"))
    defects = 0
    for name in names:
        began, tried, grown, at = time.monotonic(), 0, 0, start
        while True:
            left = began + 60 * asked.minutes - time.monotonic()
            found = watch(name, start=at, seconds=left, keep=keep, given=asked.input)
            tried, grown, at = tried + found.tried, max(grown, found.grown), at + BATCHES
            if found.defect is not None or asked.input is not None or time.monotonic() > began + 60 * asked.minutes:
                break
        took = f"{time.monotonic() - began:.0f} s, {grown >> 20:,} MiB more memory, seed {start}"
        print(f"{name}: {tried:,} inputs, {took}: {found.defect or 'no defect'}", flush=True)
        if found.defect is not None:
            defects += 1
            print(f"{found.said}\ninput: {found.input}")
            print(f"again: python -m tests.fuzz {name} --input {found.input}", flush=True)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
