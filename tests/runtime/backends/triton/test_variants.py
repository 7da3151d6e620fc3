"""What a load compiles: one to three seconds for each kernel, the first time on a machine."""

from __future__ import annotations

import pytest

from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import Counts, counted_apart

KINDS = ("fp16", "int8", "int4", "hierarchical")
MOST = 12
TOGETHER = 2
"""More of them where the rows of prompts are compensated together: the fetch, and the product."""
Cases = dict[tuple[str, str, int], Counts]


@pytest.fixture(scope="module")
def cases() -> Cases:
    return counted_apart([(name, kv, prompt) for name in MODELS for kv in KINDS for prompt in (0, 16)])


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_load_compiles_at_most_twelve_kernels(cases: Cases, model: str, kv: str) -> None:
    """One more where a window's pages are quantized and the head has other bits than the blocks: docs/decisions.md."""
    found = cases[model, kv, 0]
    another = kv in ("int4", "hierarchical") and found.variants["_gemv_kernel"] == 3
    assert found.total <= MOST + another, found
    single = {
        kernel: count for kernel, count in found.variants.items() if kernel not in ("_attend_kernel", "_gemv_kernel")
    }
    assert set(single.values()) == {1}, single
    assert found.variants["_attend_kernel"] == 3


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_prompts_compensated_together_take_two_more(cases: Cases, model: str, kv: str) -> None:
    assert cases[model, kv, 16].total == cases[model, kv, 0].total + TOGETHER


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_launches_fourteen_kernels_a_layer(cases: Cases, model: str, kv: str) -> None:
    """Four products and their compensations, two norms, heads, attention and its merge, the gate; the last norm and the
    head with its compensation."""
    assert cases[model, kv, 0].launches == 14 * MODELS[model][0].num_layers + 3
