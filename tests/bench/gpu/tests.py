"""The kernels' tests on this device: compiled instead of interpreted, those that only run on a GPU included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.bench.gpu.report import Part
from tests.bench.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[3]


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """One row: how many tests passed, were skipped and failed, and the lines that say which failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    folder = "tests/runtime/backends/triton"
    smoke = [f"{folder}/test_ahead.py", "-k", "test_warps_are_a_power_of_two"]
    command += [folder] if device.type == "cuda" else smoke
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    row = {"command": " ".join(["python", *command[1:]]), "exit_status": done.returncode, **counts}
    part.add(row | {"failures": failures})
    if done.returncode:
        sys.exit(done.stdout[-3000:])
