"""Installations: wheels for every system, and the small one, which runs stored models without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from models.errors import LEFT_OUT
from tests.lab.installations import PLATFORMS, SMALL, WHOLE, resolve

SMALL_PROGRAM = """
import sys
for name in ("torch", "transformers", "triton"):
    sys.modules[name] = None  # as where it is not installed
from app.cli.main import main
main()
"""


def names(requirements: list[str]) -> dict[str, str]:
    """Requirements by package."""
    return {re.split(r"[ <>=~\[;]", line)[0]: line for line in requirements}


def test_the_small_installation_leaves_out_what_it_says() -> None:
    whole = names(tomllib.loads(WHOLE.read_text(encoding="utf-8"))["project"]["dependencies"])
    lines = SMALL.read_text(encoding="utf-8").splitlines()
    small = names([line for line in lines if not line.startswith("#")])
    assert {name: line for name, line in whole.items() if name not in LEFT_OUT} == small


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.12", "3.14"])
@pytest.mark.parametrize("system", PLATFORMS)
def test_wheels_alone_resolve(system: str, python: str) -> None:
    for file in (WHOLE, SMALL):
        try:
            found = resolve(file, PLATFORMS[system], python)
        except subprocess.CalledProcessError as error:
            if re.search(r"error sending request|Connect|dns|offline|timed? ?out", error.stderr):
                pytest.skip("needs a package index")
            pytest.fail(error.stderr)
        assert ("torch" in found) == (file == WHOLE)
        assert not {name for name in found if name.startswith("nvidia-cu")} or file == WHOLE


def small(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line without torch, transformers and triton."""
    command = [sys.executable, "-c", SMALL_PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_a_stored_model_answers_without_torch(isolated_home: Path) -> None:
    done = small("run", "demo", "hello", "--max-tokens", "4", "--budget", "0", "--json", home=isolated_home)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["backend"] == "cpu"
    assert found["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (("quantize", "demo"), "making a low-bit model needs torch and transformers"),
        (("run", "smollm2-135m", "hi"), "making a low-bit model needs torch and transformers"),
        (("eval", "demo", "--text", __file__, "--full-precision"), "measuring in full precision needs torch"),
        (("run", "demo", "hi", "--backend", "reference"), "the reference backend needs torch"),
    ],
    ids=["quantize", "run", "eval", "reference"],
)
def test_what_needs_torch_says_so_in_one_sentence(arguments: tuple[str, ...], work: str, isolated_home: Path) -> None:
    done = small(*arguments, home=isolated_home)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"lowbit-chat: {work}")
    assert "Traceback" not in done.stderr
