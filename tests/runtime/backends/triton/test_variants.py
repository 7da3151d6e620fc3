"""What a load compiles: one to three seconds for each kernel, the first time on a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.runtime.backends.triton.shapes import MODELS

KINDS = ("fp16", "int8", "int4", "hierarchical")
MOST = 12
TOGETHER = 2
"""More of them where the rows of prompts are compensated together: the fetch, and the product."""


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, int]]:
    """By case, from a process that does not interpret."""
    cases = [f"{name}:{kv}:{prompt}" for name in MODELS for kv in KINDS for prompt in (0, 16)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.backends.triton.variants", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_load_compiles_at_most_twelve_kernels(variants: dict[str, dict[str, int]], model: str, kv: str) -> None:
    """One more where a window's pages are quantized and the head has other bits than the blocks: docs/decisions.md."""
    found = variants[f"{model}:{kv}:0"]
    another = kv in ("int4", "hierarchical") and found["_gemv_kernel"] == 3
    assert sum(found.values()) <= MOST + another, found
    assert found["_attend_kernel"] == 3
    assert all(count == 1 for kernel, count in found.items() if kernel not in ("_attend_kernel", "_gemv_kernel")), found


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_prompts_compensated_together_take_two_more(variants: dict[str, dict[str, int]], model: str, kv: str) -> None:
    alone, together = (variants[f"{model}:{kv}:{prompt}"] for prompt in (0, 16))
    assert sum(together.values()) == sum(alone.values()) + TOGETHER
