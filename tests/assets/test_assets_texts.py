"""The texts that ship: long enough, varied, and without overlap between calibration and evaluation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import assets


def windows(text: str, length: int = 6) -> list[tuple[str, ...]]:
    """Runs of words."""
    words = re.findall(r"\w+", text.casefold())
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def test_sizes() -> None:
    assert len(assets.calibration_text().encode()) >= 60_000
    assert len(assets.evaluation_text().encode()) >= 6_000


def test_evaluation_shares_nothing_with_calibration() -> None:
    shared = set(windows(assets.calibration_text())) & set(windows(assets.evaluation_text()))
    # One sentence of each introduction says that the pages were written for this project.
    assert shared <= set(windows("these pages were written for this project"))


def test_texts_are_not_made_by_repetition() -> None:
    for text in (assets.calibration_text(), assets.evaluation_text()):
        found = windows(text)
        assert len(set(found)) > 0.98 * len(found)


def test_calibration_has_several_scripts_and_code() -> None:
    text = assets.calibration_text()
    assert all(re.search(f"[{low}-{high}]", text) for low, high in ("ぁゖ", "一龯", "ая", "αω", "अह", "가힣", "بي"))
    assert text.count("```") >= 8


def test_importing_assets_loads_nothing_heavy() -> None:
    code = "import sys, assets; print('torch' in sys.modules, 'transformers' in sys.modules)"
    root = Path(assets.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
