"""The GPU backend's speed against the device's limits and other programs' kernels, in one result file.

    make bench-gpu                               or: python -m tests.bench.gpu --parts gemv,knee --out FILE.json

Every part runs in a process of its own, within a time of its own: what fails or hangs is recorded and the next begins.
Rows are written down as they come. `--smoke` runs everything tiny under Triton's interpreter, to test the benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.gpu.machine import describe, device_name
from tests.bench.gpu.report import Part
from tests.bench.reporting.origin import stamp
from tests.bench.reporting.run import shown, write_report

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "bench" / "results"
SECONDS = {
    "bandwidth": 30,
    "gemv": 70,
    "knee": 80,
    "prefill": 30,
    "delta": 30,
    "w4a8": 120,
    "attention": 180,
    "decode": 200,
    "families": 120,
    "tests": 400,
}
"""The parts in their order, and the time after which each begins no further measurement."""
GRACE = 35
"""Seconds that a part may take beyond that before it is stopped."""
DEFAULT_PARTS = ("bandwidth", "gemv", "knee", "prefill", "delta", "w4a8", "attention", "decode", "families")
"""What runs when nothing is named; `tests` runs the kernels' tests, compiled, on this device."""


def main() -> None:
    """Run the parts that were asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(DEFAULT_PARTS), help=f"some of {', '.join(SECONDS)}")
    parser.add_argument("--out", type=Path, help="the result file; default: one by the device's name beside this")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; the numbers mean nothing")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        _measure(arguments.part, arguments.out, arguments.smoke)
        return
    parts = arguments.parts.split(",")
    unknown = sorted(set(parts) - set(SECONDS))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(SECONDS)}")
    if not arguments.smoke and device_name() is None:
        parser.error("needs a CUDA device; `--smoke` shows on a CPU that the benchmark works")
    name = re.sub(r"[^a-z0-9]+", "-", (device_name() or "smoke").lower()).strip("-")
    out = arguments.out or RESULTS / f"gpu-{name}.json"
    command = " ".join(["python -m tests.bench.gpu", *shown(sys.argv[1:])])
    report: dict[str, Any] = {"command": command, **describe(), **stamp(("runtime/backends/triton",))}
    report["parts"] = {}
    for part in parts:
        print(f"{part}:", flush=True)
        _run(part, report, out, smoke=arguments.smoke)
    print(f"written to {out}")
    wrong = [row for part in report["parts"].values() for row in part["rows"] if row.get("correct") is False]
    for row in wrong:
        print(f"wrong numbers: {row}", file=sys.stderr)
    sys.exit(1 if wrong or any(part["error"] for part in report["parts"].values()) else 0)


def _run(part: str, report: dict[str, Any], out: Path, *, smoke: bool) -> None:
    """Run one part in a process of its own and take over its rows as they come."""
    environment = dict(os.environ) | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if smoke else {})
    begin = time.monotonic()
    entry: dict[str, Any] = {"seconds": 0.0, "error": None, "rows": []}
    report["parts"][part] = entry
    with tempfile.TemporaryDirectory() as folder:
        rows, errors = Path(folder) / "rows.json", Path(folder) / "errors.txt"
        command = [sys.executable, "-m", "tests.bench.gpu", "--part", part, "--out", str(rows)]
        with errors.open("w", encoding="utf-8") as stream:
            child = subprocess.Popen(
                command + ["--smoke"] * smoke, cwd=ROOT, env=environment, stderr=stream, stdin=subprocess.DEVNULL
            )
            stopped = False
            while child.poll() is None:
                time.sleep(0.2)
                if not stopped and time.monotonic() - begin > SECONDS[part] + GRACE:
                    stopped = True
                    child.kill()
                entry["seconds"] = round(time.monotonic() - begin, 1)
                _take(rows, entry, report, out)
        if stopped:
            entry["error"] = f"stopped after {entry['seconds']:.0f} seconds"
        elif child.returncode:
            entry["error"] = f"exit status {child.returncode}: {errors.read_text(encoding='utf-8')[-3000:]}"
            print(entry["error"], file=sys.stderr)
        _take(rows, entry, report, out)


def _take(rows: Path, entry: dict[str, Any], report: dict[str, Any], out: Path) -> None:
    if rows.is_file():
        entry["rows"] = json.loads(rows.read_text(encoding="utf-8"))
    write_report(out, report)


def _measure(name: str, rows: Path, smoke: bool) -> None:
    """One part, in this process."""
    import torch

    from tests.bench.gpu.sizes import FULL, SMOKE

    torch.manual_seed(0)
    if smoke:
        torch.set_num_threads(1)
    device = torch.device("cpu" if smoke else "cuda")
    module = importlib.import_module(f"tests.bench.gpu.{name}")
    module.measure(Part(rows, SECONDS[name]), SMOKE if smoke else FULL, device)


if __name__ == "__main__":
    main()
