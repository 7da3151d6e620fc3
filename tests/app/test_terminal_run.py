"""The real program on the bundled model in a real terminal, driven by `tests.app.terminal`."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux is not installed, and this drives the program through it"
)
def test_a_person_s_way_through_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.app.terminal"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing left running" in done.stdout
