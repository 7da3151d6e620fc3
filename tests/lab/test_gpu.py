"""What runs on a card is seen to run without one: minutes of a card are few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.gpu.parts import FIRST_LIGHT, PARTS, SPEEDS
from tests.lab.store import ROOT


@pytest.mark.parametrize(("product_us", "by_longer", "correct"), [(50, 1.1, True), (50, 1.2, False), (20, 1.0, False)])
def test_an_overlap_that_is_not_shown_is_no_pass(product_us: float, by_longer: float, correct: bool) -> None:
    from tests.lab.gpu.overlap import judge  # not above: kernels are decorated once all tests have been collected

    row = {"product_us": product_us, "compensation_us": 42.6, "both_by_longer": by_longer}
    assert judge([row, row], 1.15)["correct"] is correct


def test_first_light_takes_two_calls_within_fifteen_minutes() -> None:
    """A card may be lent for so long, and a command may take ten minutes; what matters most is measured first."""
    both = [sum(each.values()) for each in (FIRST_LIGHT, SPEEDS)]
    assert max(both) <= 570
    assert sum(both) <= 885, "the rest is for what happens between parts"
    assert next(iter(SPEEDS)) == "decode"
    assert {"w4a8", "families"} <= {*SPEEDS}


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.lab.gpu", "--dry", "--parts", ",".join(PARTS), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["versions"]["torch"]
    for name, entry in report["parts"].items():
        assert entry["error"] is None, name
        assert entry["rows"], name
        assert all("card" in row for row in entry["rows"]), name
