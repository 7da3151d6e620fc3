"""The time from the catalogue to the first word, measured on the bundled checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.tui.jobs import STAGES
from assets import demo_checkpoint_path
from tests.bench.first_word import checkpoint_files, measure, report


@pytest.mark.slow
def test_a_model_goes_from_the_hub_to_its_first_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    files = checkpoint_files(demo_checkpoint_path())
    kernels = Path(os.environ.get("LOWBIT_CHAT_KERNEL_CACHE") or tmp_path / "kernels")
    (row,) = measure({"the bundled one": ("tiny", files)}, warm=kernels, question="hello")
    assert row["bytes"] == sum(map(len, files.values()))
    assert row["all"] == pytest.approx(sum(row[stage] for stage in STAGES) + row["word"], abs=0.1)
    assert min(row["fetch"], row["quantize"], row["load"], row["word"]) > 0
    assert "| the bundled one |" in report([row])
