"""The GPU benchmark runs in every part, tiny and interpreted; what fails in one part does not stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(out: Path, *arguments: str, before: str = "") -> tuple[subprocess.CompletedProcess[str], dict]:
    """The benchmark in a process of its own, and its result file. `before` is run first, with the program as `main`."""
    code = f"import sys; import tests.bench.gpu.__main__ as main\n{before}\nmain.main()"
    command = [sys.executable, "-c", code, "--smoke", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> dict:
    """The result file of two parts in processes of their own, and of the others in one, which starts sooner."""
    folder = tmp_path_factory.mktemp("benchmark")
    done, report = run_benchmark(folder / "result.json", "--parts", "bandwidth,tests")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = ("gemv", "knee", "prefill", "delta", "w4a8", "attention", "decode", "families")
    rows = {part: folder / f"{part}.json" for part in parts}
    code = "import pathlib, sys; from tests.bench.gpu.__main__ import _measure\n"
    code += "for part, file in zip(sys.argv[1::2], sys.argv[2::2]):\n    _measure(part, pathlib.Path(file), True)"
    command = [sys.executable, "-c", code, *(str(word) for pair in rows.items() for word in pair)]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=interpreted, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report["parts"] |= {
        part: {"error": None, "rows": json.loads(file.read_text(encoding="utf-8"))} for part, file in rows.items()
    }
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "columns"),
    [
        ("bandwidth", {"what", "gb_s"}),
        ("gemv", {"what", "kind", "N", "K", "p20_us", "p50_us", "p80_us", "gb_s", "percent_of_reads"}),
        ("gemv", {"what", "kind", "bits", "chosen", "us"}),
        ("knee", {"kind", "bits", "n_tb", "k_chunk", "p50_us", "normalized", "fetched_gb_s"}),
        ("prefill", {"what", "kind", "M", "p50_us", "tflop_s"}),
        ("delta", {"what", "rows", "p50_us", "us_a_row", "percent_of_limit"}),
        ("delta", {"what", "rows", "largest_error", "correct"}),
        ("w4a8", {"what", "batch", "tokens_per_second"}),
        ("attention", {"what", "context", "p50_us", "gb_s", "percent_of_reads", "times_as_fast_as_torch"}),
        ("decode", {"bits", "budget_percent", "tokens_per_second", "measured_slowdown_percent"}),
        ("families", {"model", "k_chunk", "milliseconds", "percent_of_limit"}),
        ("families", {"model", "rows", "rows_per_second"}),
        ("families", {"model", "experts_on_device", "milliseconds", "hit_rate"}),
        ("tests", {"command", "exit_status", "passed"}),
    ],
)
def test_a_part_measures(part, columns, everything):
    assert everything["parts"][part]["error"] is None
    assert everything["versions"]["triton"]
    rows = everything["parts"][part]["rows"]
    assert any(columns <= set(row) for row in rows), rows
    assert not any("left out" in str(row.get("what")) for row in rows)


def test_a_part_that_fails_or_hangs_is_recorded_and_the_next_runs(tmp_path):
    before = "main.SECONDS = {'no_such_part': 240, 'tests': -main.GRACE, 'bandwidth': 60}"
    done, report = run_benchmark(tmp_path / "result.json", "--parts", "no_such_part,tests,bandwidth", before=before)
    assert done.returncode == 1
    errors = {part: entry["error"] for part, entry in report["parts"].items()}
    assert "No module named 'tests.bench.gpu.no_such_part'" in errors["no_such_part"]
    assert errors["tests"] == "stopped after 0 seconds"
    assert errors["bandwidth"] is None
    assert report["parts"]["bandwidth"]["rows"]


def test_an_unknown_part_is_named(tmp_path):
    done, report = run_benchmark(tmp_path / "result.json", "--parts", "gemv,speed")
    assert done.returncode == 2
    assert "there is no part 'speed'" in done.stderr
    assert not report


def test_copies_of_an_operand_share_nothing():
    from tests.bench.gpu.matrices import copies, random_weight

    first, second = copies(random_weight((32, 512), 3, torch.device("cpu")), 2)
    for name in ("codes", "groups"):
        one, other = getattr(first, name), getattr(second, name)
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
