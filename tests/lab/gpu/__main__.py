"""First light on a card that this program has never run on, and what it does there beside the card's limits.

    python -m tests.lab.gpu                           first light: seven minutes, without further packages
    python -m tests.lab.gpu --parts speeds            then eight more: decoding, W4A8, families, compute-sanitizer
    python -m tests.lab.gpu --parts benchmark         more speeds; or tests: the kernels' tests, compiled on this card
    python -m tests.lab.gpu --parts gemv,knee --out FILE.json

Every part runs in a process of its own with a watchdog: one that hangs is killed with all it started, and its last row
says at what. Rows are written down as they come, outside the repository: in the folder that $OUT names, or that of
temporary files. Ends with 1 where a row is wrong or a part failed. `--dry` runs
everything tiny, interpreted, without a card and in one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from tests.lab.gpu.parts import CHOSEN, PARTS, SETS, TESTS, TOGETHER
from tests.lab.gpu.record import Part, describe, device_name
from tests.lab.store import ROOT, listed, parser, read, shown, table, write

_LEAVE = 0.75
"""Share of its time after which a part begins no further measurement."""
_PR_SET_PDEATHSIG = 1
Entry = dict[str, Any]
"""What is known of a part: seconds, rows, error (None: it ended well)."""


class Child:
    """A command in a session of its own, killed with all it started when its time is over."""

    running: ClassVar[set[Child]] = set()

    def __init__(self, command: Sequence[str], seconds: float, environment: dict[str, str], folder: Path) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        self._said, self._errors = folder / "said.txt", folder / "errors.txt"
        with self._said.open("w") as said, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                start_new_session=True,
            )
        Child.running.add(self)

    def wait(self, each: Callable[[], object] = lambda: None) -> str | None:
        """Wait for its end, calling `each` now and then. Returns what went wrong, or None."""
        try:
            while self._process.poll() is None:
                each()
                if self.seconds > self._seconds:
                    return f"still busy after {self.seconds:.0f} seconds, and stopped"
                time.sleep(0.1)
        finally:
            self.kill()
            Child.running.discard(self)
        if not self._process.returncode:
            return None
        lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {self._process.returncode}: {' | '.join(lines[-3:])}"

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self._began

    @property
    def output(self) -> str:
        """What it has said."""
        return self._said.read_text(errors="replace")

    def kill(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_parts(names: Sequence[str], seconds: float, beside: int, dry: bool, keep: Callable[[str, Entry], None]) -> None:
    """Run parts in a process of their own; `keep` is given what is known of each, now and then and in the end."""
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // beside))} if beside > 1 else {}
    environment = own | dict(os.environ) | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.lab.gpu", "--part", ",".join(names), folder, str(seconds)]
        command.append(str(os.getpid()))
        child = Child(command + ["--dry"] * dry, seconds, environment, Path(folder))

        def known(error: str | None) -> None:
            for name in names:
                rows = read(Path(folder) / f"{name}.json") or []
                keep(name, {"seconds": round(child.seconds, 1), "rows": rows, "error": error})

        known(child.wait(lambda: known("not ended yet")))


def run_tests(name: str, seconds: float, keep: Callable[[str, Entry], None]) -> None:
    """Run tests of kernels, with no plugin of pytest; those that time did not suffice for are counted."""
    tool = [] if name in TESTS else ["compute-sanitizer", "--tool", name, "--error-exitcode", "1"]
    if tool and shutil.which(tool[0]) is None:
        keep(name, {"seconds": 0.0, "rows": [{"what": f"left out: there is no {tool[0]}"}], "error": None})
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\nmarkers =\n    gpu\n    slow\n    data\n    timeout\n", encoding="utf-8")
        command = [*tool, sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT), "-v"]
        command += [*CHOSEN[name], "--import-mode=importlib", "-p", "no:cacheprovider", "tests/runtime/backends/triton"]
        command += ["tests/runtime/backends/contract"] if name == "oracle" else []
        child = Child(command, seconds, {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, Path(folder))
        error = child.wait()
        said = child.output
    ended = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", said, re.MULTILINE)
    counts = {how.lower(): sum(found == how for _, found in ended) for how in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failures = [test for test, how in ended if how in ("FAILED", "ERROR")]
    found = re.search(r"collected (\d+) items?(?: / (\d+) deselected)?", said)
    row = {**counts, "not_reached": int(found[1]) - int(found[2] or 0) - len(ended) if found else None}
    row |= {"failures": failures, "correct": not failures and counts["passed"] > 0}
    if tool:  # it says so in what it prints, whatever the tests say
        row["sanitizer_errors"] = sum(map(int, re.findall(r"ERROR SUMMARY: (\d+) error", said)))
        row["correct"] = row["correct"] and not row["sanitizer_errors"]
    keep(name, {"seconds": round(child.seconds, 1), "rows": [row], "error": None if ended else error})


def measure(names: Sequence[str], folder: Path, seconds: float, parent: int, *, dry: bool) -> None:
    """Parts, in this process, which the system kills when the one that started it ends."""
    import torch

    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that started this part has ended")
    from tests.lab.gpu.sizes import DRY, FULL

    with contextlib.ExitStack() as stack:
        if dry:
            from tests.runtime.backends.triton.interpreter import patched_once  # which needs pytest

            torch.set_num_threads(1)
            stack.enter_context(patched_once())  # Triton's own interpreter knows no assembly
        for name in names:
            torch.manual_seed(0)
            module = importlib.import_module(f"tests.lab.gpu.{name}")
            part = Part(folder / f"{name}.json", _LEAVE * seconds, device_name())
            module.measure(part, DRY if dry else FULL, torch.device("cpu" if dry else "cuda"))


def turns(parts: Sequence[str]) -> Iterator[list[str]]:
    """The parts in their order, those of `TOGETHER` in one turn."""
    together = [part for part in parts if part in TOGETHER]
    for part in parts:
        if part not in TOGETHER:
            yield [part]
        elif part == together[0]:
            yield together


def wrong(entry: Entry) -> bool:
    """Whether a part failed, or says that a number is wrong."""
    return bool(entry["error"]) or any(row.get("correct") is False for row in entry["rows"])


def summary(report: dict[str, Any]) -> str:
    """A line for each part: whether all is right, what was left out, and the first thing that is wrong."""
    lines, device = [], report["device"]
    for name, entry in report["parts"].items():
        bad = [row for row in entry["rows"] if row.get("correct") is False]
        left = sum("left out" in str(row.get("what")) for row in entry["rows"])
        said = entry["error"] or (str(bad[0])[:300] if bad else "")
        lines.append((name, "wrong" if wrong(entry) else "right", entry["seconds"], len(entry["rows"]), left, said))
    head = ("part", "", "s", "rows", "left out", "first wrong")
    return f"{device['name'] if device else 'without a card'}\n{table(head, lines)}"


def main() -> None:
    """Run the parts that were asked for."""
    if sys.argv[1:2] == ["--part"]:
        names, folder, seconds, parent, *dry = sys.argv[2:]
        measure(names.split(","), Path(folder), float(seconds), int(parent), dry=bool(dry))
        return
    options = parser(__doc__)
    options.add_argument("--dry", action="store_true", help="tiny, interpreted, without a card")
    options.add_argument("--parts", default="first-light", help=f"{', '.join(SETS)}, or some of {', '.join(PARTS)}")
    given = options.parse_args()
    limits = SETS.get(given.parts, PARTS | TESTS)
    parts = tuple(limits) if given.parts in SETS else listed(given.parts)
    if unknown := sorted({*parts} - {*PARTS, *TESTS}):
        options.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if not given.dry and device_name() is None:
        options.error("needs a CUDA device; `--dry` shows without one that the command works")
    device = re.sub(r"[^a-z0-9]+", "-", (device_name() or "dry").lower()).strip("-")
    folder = Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "first-light")
    out = given.out or folder / f"{given.parts if given.parts in SETS else 'gpu'}-{device}.json"
    command = " ".join(["python -m tests.lab.gpu", *shown(sys.argv[1:])])
    report: dict[str, Any] = {"command": command, **describe(), "parts": {}}
    print(json.dumps({name: value for name, value in report.items() if name != "parts"}, indent=1), flush=True)
    lock = threading.Lock()

    def keep(name: str, entry: Entry) -> None:
        with lock:
            report["parts"][name] = entry
            write(out, report)

    def stop(number: int, _frame: object) -> None:
        for child in tuple(Child.running):
            child.kill()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    for turn in [[part for part in parts if part not in CHOSEN]] if given.dry else turns(parts):
        print(f"{', '.join(turn)} ...", flush=True)
        if turn[0] in CHOSEN:
            run_tests(turn[0], limits[turn[0]], keep)
            continue
        seconds = 3600.0 if given.dry else sum(limits[part] for part in turn)
        children = [turn] if given.dry else [[part] for part in turn]
        with ThreadPoolExecutor(len(children)) as pool:
            for one in [pool.submit(run_parts, own, seconds, len(children), given.dry, keep) for own in children]:
                one.result()
        if turn == ["start"] and wrong(report["parts"]["start"]):
            break  # where no kernel can run, nothing else tells anything
    print(f"{summary(report)}\n{out}")
    sys.exit(any(wrong(entry) for entry in report["parts"].values()))


if __name__ == "__main__":
    main()
