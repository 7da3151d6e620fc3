"""The kernels' tests on this device: compiled instead of interpreted, those that only run on a GPU included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.bench.gpu.report import Part
from tests.bench.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[3]


def bare_pytest(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command that runs tests, and its environment: no plugin of pytest, none of this project's settings of plugins.

    Args:
        folder: Where its settings go, until it has ended.
        arguments: Which tests.
    """
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\nmarkers =\n    gpu\n    slow\n    data\n    timeout\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", *arguments]
    return command, dict(os.environ) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """One row: how many tests passed, were skipped and failed, and the lines that say which failed."""
    kernels = "tests/runtime/backends/triton"
    smoke = [f"{kernels}/test_ahead.py", "-k", "test_warps_are_a_power_of_two"]
    with tempfile.TemporaryDirectory() as folder:
        command, environment = bare_pytest(Path(folder), ["-q", *([kernels] if device.type == "cuda" else smoke)])
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    row = {"command": " ".join(["python", *command[1:]]), "exit_status": done.returncode, **counts}
    part.add(row | {"failures": failures})
    if done.returncode:
        sys.exit(done.stdout[-3000:])
