"""First light without a card: every part runs, hanging ones are stopped, and the report names the defects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.first_light.__main__ import MODULE, SECONDS, SLOTS, WHOLE_S
from tests.bench.first_light.runner import ROOT, run_parts
from tests.bench.first_light.verdict import PURPOSE, broken, verdict

HANGING = """
import pathlib, subprocess, sys, time
sys.path.insert(0, {root!r})
from tests.bench.first_light.runner import die_with
options = {{name: sys.argv[sys.argv.index(name) + 1] for name in ("--parent", "--out")}}
die_with(int(options["--parent"]))
folder = pathlib.Path(options["--out"])
grandchild = subprocess.Popen(["sleep", "1000"])
half = folder / "half"
half.write_text('[{{"pid": %d, "correct": true}}]' % grandchild.pid)
half.rename(folder / "graph.json")
pathlib.Path({mark!r}).write_text(str(grandchild.pid))
time.sleep(1000)
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A part that writes a row, starts a program and hangs; gives the number of that program's process."""
    mark = tmp_path / "mark"
    (tmp_path / "hanging_part.py").write_text(HANGING.format(root=str(ROOT), mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def started() -> int:
        until = time.monotonic() + 20
        while not mark.is_file() or not mark.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        return int(mark.read_text())

    return started


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def run(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", MODULE, "--dry", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text()) if out.is_file() else {}


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path: Path) -> None:
    done, report = run(tmp_path / "result.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["parts"]) == list(SECONDS)
    for name, entry in report["parts"].items():
        assert entry["error"] is None, name
        assert entry["rows"], name
        assert not any("left out" in str(row.get("what")) for row in entry["rows"]), name
    assert "Nothing is broken." in done.stdout
    assert (tmp_path / "result.txt").read_text().strip() == done.stdout.strip()


@pytest.mark.slow
def test_a_slot_goes_on_with_tests_and_benchmark(tmp_path: Path) -> None:
    """The tests run without plugins of pytest, which a machine with a card may not have."""
    done, report = run(tmp_path / "result.json", "--slot", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = report["parts"]["tests"]["rows"]
    assert row["passed"] == 2
    assert json.loads((tmp_path / "result-bench.json").read_text())["parts"]["bandwidth"]["rows"]


def test_everything_ends_within_nine_minutes() -> None:
    assert WHOLE_S <= 530
    assert sum(SECONDS.values()) <= WHOLE_S
    assert all(sum(seconds for _, seconds in slot) <= WHOLE_S for slot in SLOTS.values())
    assert set(SECONDS) | {"tests", "bench"} == set(PURPOSE)


def test_a_part_that_hangs_is_stopped_with_all_it_started(hanging: Callable[[], int]) -> None:
    found: dict[str, Any] = {}
    run_parts("hanging_part", ["graph", "link"], 2.0, dry=True, each=found.update)
    assert "still busy after" in found["graph"]["error"]
    assert found["graph"]["rows"][0]["correct"]
    assert found["link"]["rows"] == []
    assert gone(hanging())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_part_outlives_the_command(hanging: Callable[[], int], number: int) -> None:
    """Asked to end, it takes along what its part started; killed, the part itself goes."""
    code = "from tests.bench.first_light.runner import *; stop_with_children()\n"
    code += "run_parts('hanging_part', ['graph'], 100.0, dry=True, each=lambda _: None)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ)) as command:
        try:
            grandchild = psutil.Process(hanging())
            part = grandchild.parent()
            assert part is not None
        finally:
            command.send_signal(number)
    assert gone(part.pid)
    if number == signal.SIGTERM:
        assert gone(grandchild.pid)
    else:
        grandchild.kill()


def entry(*rows: dict[str, Any], error: str | None = None) -> dict[str, Any]:
    return {"seconds": 1.0, "rows": list(rows), "error": error}


def test_the_page_names_the_first_broken_thing() -> None:
    rows = [{"kv": "fp16", "tokens": 9, "equal": 7, "near_ties": 0, "largest_error": 1.0, "correct": False}]
    parts = {
        "tune": entry(error="still busy after 60 seconds, and stopped"),
        "tokens": entry(*rows),
        "graph": entry({"what": "begun", "n_tb": 24}, error="still busy after 80 seconds, and stopped"),
        "start": entry({"what": "probe", "correct": True}),
    }
    report = {"parts": parts, "device": {"name": "Some Card"}, "date": "today"}
    found = broken(parts)
    assert [line.partition(":")[0] for line in found] == ["graph", "tokens", "tune"]
    assert "n_tb 24" in found[0]
    page = verdict(report)
    assert page.index("The first broken thing:") < page.index("graph: still busy")
    assert "start    ok" in page
    assert "Some Card" in page
    parts["graph"] = parts["tokens"] = parts["tune"] = entry({"correct": True})
    assert "Nothing is broken." in verdict(report)


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    done, report = run(tmp_path / "result.json", "--parts", "graph,speed")
    assert done.returncode == 2
    assert "there is no part 'speed'" in done.stderr
    assert not report
