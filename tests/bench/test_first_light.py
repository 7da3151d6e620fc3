"""First light without a card: every part runs, hanging ones are stopped, and the report names the defects."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tests.runtime.backends.triton.interpreter  # noqa: F401 - before any kernel is decorated

# isort: split
from runtime.backends.triton.decoder import TritonDecoder
from tests.bench.first_light import __main__ as command
from tests.bench.first_light import link, tune
from tests.bench.first_light.__main__ import EXPECTED, MODULE, SECONDS, SLOTS, TOGETHER, WHOLE_S, counted
from tests.bench.first_light.runner import ROOT, run_parts
from tests.bench.first_light.sizes import DRY, Amount
from tests.bench.first_light.verdict import PURPOSE, broken, not_shown, verdict
from tests.bench.gpu.clock import Times
from tests.bench.gpu.report import Part

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
    assert "Everything was shown, and nothing is broken." in done.stdout
    assert (tmp_path / "result.txt").read_text().strip() == done.stdout.strip()


@pytest.mark.slow
def test_a_slot_goes_on_with_tests_and_benchmark(tmp_path: Path) -> None:
    """The tests run without plugins of pytest, which a machine with a card may not have."""
    done, report = run(tmp_path / "result.json", "--slot", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("tests", "oracle"):
        (row,) = report["parts"][part]["rows"]
        assert (row["passed"], row["not_reached"]) == (2, 0)
    done, report = run(tmp_path / "second.json", "--slot", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "second-bench.json").read_text())["parts"]["bandwidth"]["rows"]


def test_everything_ends_within_nine_minutes() -> None:
    assert WHOLE_S <= 530
    assert sum(SECONDS.values()) <= WHOLE_S
    assert all(sum(seconds for _, seconds in slot) <= WHOLE_S for slot in SLOTS.values())
    assert set(SECONDS) | {"tests", "oracle", "bench"} == set(PURPOSE)
    assert set(EXPECTED) == set(SLOTS)


def test_parts_that_judge_no_time_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the time of all of them; every other part runs alone."""
    met, ran = threading.Barrier(len(TOGETHER)), dict[str, float]()

    def part(_module: str, names: list[str], seconds: float, *, each: Callable[..., None], **_: Any) -> None:
        (name,) = names
        if name in TOGETHER:
            met.wait(20)
        else:
            assert not met.n_waiting
        ran[name] = seconds
        each({name: entry({"what": name, "correct": True})})

    monkeypatch.setattr(command, "run_parts", part)
    report: dict[str, Any] = {"parts": {}, "device": None, "date": "", "expected": list(SECONDS)}
    command._look(list(SECONDS), report, tmp_path / "result.json")
    assert set(ran) == set(report["parts"]) == set(SECONDS)
    assert not broken(report["parts"])
    assert ran["draw"] == sum(SECONDS[name] for name in TOGETHER)
    assert ran["link"] == SECONDS["link"]


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
    report = {"parts": parts, "device": {"name": "Some Card"}, "date": "today", "expected": list(parts)}
    found = broken(parts)
    assert [line.partition(":")[0] for line in found] == ["graph", "tokens", "tune"]
    assert "n_tb 24" in found[0]
    page = verdict(report)
    assert page.index("The first broken thing:") < page.index("graph: still busy")
    assert "start    shown" in page
    assert "Some Card" in page
    parts["graph"] = parts["tokens"] = parts["tune"] = entry({"correct": True})
    assert "Everything was shown, and nothing is broken." in verdict(report)


SOME = "collecting ... collected 9 items / 2 deselected\na.py::b PASSED [ 14%]\na.py::c SKIPPED [ 28%]\n"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (None, "it was not run"),
        (entry({"what": "left out for want of time", "kv": "int8"}, {"kv": "fp16", "correct": True}), "kv int8"),
        (entry({"kv": "fp16"}), "nothing was judged"),
        (entry(counted(SOME)), "5 were left"),
        (entry(counted("")), "an unknown number"),
    ],
)
def test_what_was_left_out_is_not_shown(left: Any, words: str) -> None:
    """Nothing is broken, and still the page does not say so."""
    parts = {"graph": entry({"correct": True})} | ({} if left is None else {"tokens": left})
    report = {"parts": parts, "device": None, "date": "today", "expected": ["graph", "tokens"]}
    (said,) = not_shown(report)
    assert said.startswith("tokens: not shown")
    assert words in said
    page = verdict(report)
    assert said in page
    assert "othing is broken" not in page
    assert ("tokens   not shown" in page or "tokens   broken" in page) == (left is not None)


def test_tests_that_failed_are_counted_and_named() -> None:
    row = counted("collecting ... collected 2 items\na.py::b[x y] PASSED [ 50%]\na.py::c FAILED [100%]\n")
    assert (row["passed"], row["failures"], row["not_reached"], row["correct"]) == (1, ["a.py::c"], 0, False)


@pytest.mark.parametrize(
    ("k_chunk", "slowdown", "judged"), [({"o": 8}, 4.9, True), ({"o": 8}, 5.1, False), ({"o": 0}, 0.0, False)]
)
def test_a_budget_must_buy_something_and_be_kept_as_measured(
    k_chunk: dict[str, int], slowdown: float, judged: bool
) -> None:
    row = {"k_chunk": k_chunk, "measured_slowdown_percent": slowdown, "held_slowdown_percent": 1.0}
    assert tune.kept(row) is judged


def looked_at(part: str, folder: Path, amount: Amount) -> str:
    """The page of one part, run dry in this process."""
    found = Part(folder / "rows.json", 1e9)
    importlib.import_module(f"{MODULE}.{part}").measure(found, amount, torch.device("cpu"))
    report = {"parts": {part: entry(*found.rows)}, "device": None, "date": "today", "expected": [part]}
    return verdict(report)


ONE = replace(DRY, kinds=("fp16",), decoded=1, n_tbs=(1,))


@pytest.mark.parametrize("fault", [False, True])
def test_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: bool) -> None:
    forward = TritonDecoder.forward
    if fault:
        monkeypatch.setattr(TritonDecoder, "forward", lambda self, step: -forward(self, step))
    page = looked_at("tokens", tmp_path, ONE)
    assert ("tokens: not shown that tokens are the reference's" in page) == fault
    assert ("nothing is broken" in page) != fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_slow_fetch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: bool) -> None:
    """At a tenth of the copies' speed instead of nine tenths."""

    def race(contestants: dict[str, Any], *_: Any, **__: Any) -> dict[str, Times]:
        seconds = 64 * 128 / (1e9 if fault else 9e9)  # rows of 64 outputs fill lines of 128 bytes
        return dict.fromkeys(contestants, Times(p20=seconds, p50=seconds, p80=seconds, replays=1))

    monkeypatch.setattr(link, "race", race)
    monkeypatch.setattr(link, "host_to_device_gb_s", lambda *_, **__: 10.0)
    page = looked_at("link", tmp_path, replace(ONE, least_of_link=0.5))
    assert ("link: not shown that residuals are read nearly as fast" in page) == fault
    assert ("nothing is broken" in page) != fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_leak_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: bool) -> None:
    """Somebody keeps the buffers of every model that was unloaded."""
    kept, close = [], TritonDecoder.close

    def forget(decoder: TritonDecoder) -> None:
        kept.append(decoder.buffers)
        close(decoder)

    if fault:
        monkeypatch.setattr(TritonDecoder, "close", forget)
    page = looked_at("memory", tmp_path, ONE)
    assert ("memory: not shown that a load takes what was planned" in page) == fault
    assert ("nothing is broken" in page) != fault


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    done, report = run(tmp_path / "result.json", "--parts", "graph,speed")
    assert done.returncode == 2
    assert "there is no part 'speed'" in done.stderr
    assert not report
