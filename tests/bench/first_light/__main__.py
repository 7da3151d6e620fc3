"""A nine-minute check of a card that this program has never run on, with a page of results in words.

    make first-light                             or: python -m tests.bench.first_light
    make first-light-more SLOT=1                 or: python -m tests.bench.first_light --slot 1   (then 2)

Needs the program's own dependencies and nothing else. Every part runs in a process of its own with a watchdog; results
are written down as they come, and the page names the first broken thing. The slots continue with the tests that need a
card and with the benchmark (`tests.bench.gpu`), nine minutes each. `--dry` runs everything tiny and without a card.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.first_light.runner import ROOT, Child, Entry, die_with, run_parts, stop_with_children
from tests.bench.first_light.verdict import broken, not_shown, verdict
from tests.bench.gpu.machine import describe, device_name
from tests.bench.gpu.report import Part
from tests.bench.gpu.tests import bare_pytest
from tests.bench.reporting.origin import stamp
from tests.bench.reporting.run import shown, write_report

MODULE = "tests.bench.first_light"
RESULTS = ROOT / "tests" / "bench" / "results"
SECONDS = {
    "start": 45,
    "graph": 55,
    "tokens": 75,
    "shapes": 95,
    "chat": 45,
    "memory": 45,
    "overlap": 40,
    "link": 25,
    "draw": 15,
    "product": 35,
    "tune": 45,
}
"""The parts in their order, what tells most first, and the time that each has before it is killed."""
TOGETHER = ("graph", "tokens", "shapes", "draw")
"""Parts that judge numbers, not times: they run at the same time, so that one compiles while another computes. Each may
take the time of all of them."""
WHOLE_S = 520
"""Nothing runs longer than that: a slot has nine minutes."""
_LEAVE = 0.75
"""Share of its time after which a part begins no further measurement."""
SLOTS = {"1": (("tests", 150), ("oracle", 360)), "2": (("bandwidth,knee,gemv,prefill,attention,decode", 510),)}
"""What continues in two more slots: the tests that need a card, those of kernels against their oracles, and parts of
the benchmark; seconds for each."""
EXPECTED = {"1": ["tests", "oracle"], "2": ["bench"]}
"""Parts of these slots."""
TESTS = {"tests": "gpu", "oracle": "not gpu and not slow"}
"""Which tests of kernels these are."""
_ORACLES = ("tests/runtime/backends/contract", "tests/runtime/backends/triton")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny, interpreted, without a card")
    parser.add_argument("--slot", choices=SLOTS, help="continue with the tests and the benchmark")
    parser.add_argument("--parts", default=",".join(SECONDS), help="some of %(default)s")
    parser.add_argument("--out", type=Path, help="the result file, .json; the page of words lies beside it")
    for hidden in ("--part", "--parent", "--seconds"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        die_with(int(arguments.parent))
        _measure(arguments.part.split(","), arguments.out, float(arguments.seconds), dry=arguments.dry)
        return
    parts = arguments.parts.split(",")
    if unknown := sorted(set(parts) - set(SECONDS)):
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(SECONDS)}")
    if not arguments.dry and device_name() is None:
        parser.error("needs a CUDA device; `--dry` shows without one that the command works")
    stop_with_children()
    slot = f"-slot-{arguments.slot}" if arguments.slot else ""
    name = re.sub(r"[^a-z0-9]+", "-", (device_name() or "dry").lower()).strip("-")
    out = arguments.out or RESULTS / f"first-light-{name}{slot}.json"
    report: dict[str, Any] = {
        "command": " ".join(["python -m", MODULE, *shown(sys.argv[1:])]),
        **describe(),
        **stamp(("runtime/backends/triton",)),
        "parts": {},
    }
    report["expected"] = EXPECTED[arguments.slot] if arguments.slot else list(SECONDS)
    if arguments.slot:
        _continue(arguments.slot, report, out, dry=arguments.dry)
    elif arguments.dry:
        run_parts(MODULE, parts, WHOLE_S, dry=True, each=lambda found: _keep(found, report, out))
    else:
        _look(parts, report, out)
    _keep({}, report, out)
    print(verdict(report))
    sys.exit(1 if broken(report["parts"]) else 2 if not_shown(report) else 0)


def _keep(found: dict[str, Entry], report: dict[str, Any], out: Path) -> None:
    """Take over what is known of some parts; report and page are on disk at any time."""
    report["parts"] |= found
    write_report(out, report)
    out.with_suffix(".txt").write_text(verdict(report), encoding="utf-8")


def _look(parts: list[str], report: dict[str, Any], out: Path) -> None:
    """Each part in a process of its own; what follows a card that runs no kernel is left out."""
    began, lock = time.monotonic(), threading.Lock()

    def keep(found: dict[str, Entry]) -> None:
        with lock:
            _keep(found, report, out)

    for turn in _turns(parts):
        print(f"{', '.join(turn)} ...", flush=True)
        left = WHOLE_S - (time.monotonic() - began)
        seconds = max(1.0, min(sum(SECONDS[part] for part in turn), left))
        with ThreadPoolExecutor(len(turn)) as pool:
            how = {"dry": False, "each": keep, "beside": len(turn)}
            for one in [pool.submit(run_parts, MODULE, [part], seconds, **how) for part in turn]:
                one.result()
        if turn == ["start"] and broken(report["parts"]):
            return


def _turns(parts: Sequence[str]) -> Iterator[list[str]]:
    """The parts in their order, those of `TOGETHER` in one turn."""
    together = [part for part in parts if part in TOGETHER]
    for part in parts:
        if part not in TOGETHER:
            yield [part]
        elif part == together[0]:
            yield together


def _continue(slot: str, report: dict[str, Any], out: Path, *, dry: bool) -> None:
    """Tests and benchmark; the benchmark's own result file lies beside this one."""
    for what, seconds in SLOTS[slot]:
        print(f"{what} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            run = _tests if what in TESTS else _benchmark
            name = what if what in TESTS else "bench"
            _keep({name: run(what, seconds, Path(folder), out, dry=dry)}, report, out)


def _tests(what: str, seconds: float, folder: Path, _out: Path, *, dry: bool) -> Entry:
    """Tests of the kernels; those that time did not suffice for are counted."""
    chosen = ["-v", "-m", TESTS[what], *(_ORACLES[1:] if what == "tests" else _ORACLES)]
    command, environment = bare_pytest(folder, ["-v", f"{_ORACLES[1]}/test_far_pages.py"] if dry else chosen)
    child = Child(command, seconds, environment, folder)
    error = child.wait()
    return {"seconds": child.took, "rows": [counted(child.output)], "error": None if child.stopped else error}


def counted(said: str) -> dict[str, Any]:
    """The row of a run of tests by what pytest said, to its end or not."""
    ended = [(name, how) for name, how in re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", said, re.MULTILINE)]
    counts = {how.lower(): sum(found == how for _, found in ended) for how in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failures = [name for name, how in ended if how in ("FAILED", "ERROR")]
    found = re.search(r"collected (\d+) items?(?: / (\d+) deselected)?", said)
    left = int(found[1]) - int(found[2] or 0) - len(ended) if found else None
    row = {"what": "tests", **counts, "failures": failures or None, "not_reached": left}
    if left != 0:
        row["what"] = f"tests, of which {'an unknown number' if left is None else left} were left out for want of time"
    return row | {"correct": not failures and counts["passed"] > 0}


def _benchmark(what: str, seconds: float, folder: Path, out: Path, *, dry: bool) -> Entry:
    file = out.with_name(f"{out.stem}-bench.json")
    command = [sys.executable, "-m", "tests.bench.gpu", "--parts", "bandwidth" if dry else what, "--out", str(file)]
    child = Child([*command, *(["--smoke"] * dry)], seconds, dict(os.environ), folder)
    error = child.wait()
    return {"seconds": child.took, "rows": [{"what": "benchmark", "parts": what, "file": file.name}], "error": error}


def _measure(parts: list[str], folder: Path, seconds: float, *, dry: bool) -> None:
    """Some parts, in this process."""
    import torch

    from tests.bench.first_light.sizes import DRY, FULL

    torch.manual_seed(0)
    if dry:
        torch.set_num_threads(1)
    device = torch.device("cpu" if dry else "cuda")
    for part in parts:
        module = importlib.import_module(f"{MODULE}.{part}")
        module.measure(Part(folder / f"{part}.json", _LEAVE * seconds), DRY if dry else FULL, device)
        (folder / f"{part}.ended").touch()


if __name__ == "__main__":
    main()
