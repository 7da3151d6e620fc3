"""Kernels that a load compiles: one to three seconds each, the first time on a machine."""

from __future__ import annotations

import pytest

from runtime.backends.triton.sizes import COPIED_BYTES
from tests.bench.kernels.token_time import ROWS, launches
from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import Case, Counts, counted_apart

KINDS = ("fp16", "int8", "int4", "hierarchical")
COUNTED = ("demo", "llama-3-8b-3bit")
"""Models whose launches are counted by rows."""
PROMPTS = (0, 16)
"""Channels of 1024 by which the rows of prompts are compensated together."""
ALWAYS = {
    *("_add_norm_kernel", "_compensate_kernel", "_gate_kernel", "_gemm_kernel", "_heads_kernel", "_merge_kernel"),
    *("_select_kernel", "_union_kernel", "_copy_kernel", "_fetch_kernel"),
}
"""Kernels of one specialization, whatever is loaded."""
TOGETHER = {"_multiply_kernel", "_stage_kernel"}
"""Further ones where the rows of prompts are compensated together: the fetch, and the product."""
Cases = dict[Case, Counts]


@pytest.fixture(scope="module")
def cases() -> Cases:
    return counted_apart([(name, kv, prompt) for name in MODELS for kv in KINDS for prompt in PROMPTS])


@pytest.fixture(scope="module")
def by_rows() -> Cases:
    return counted_apart([(name, "int4", 0, rows) for name in COUNTED for rows in ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_load_compiles_fifteen_to_nineteen_kernels(cases: Cases, model: str, kv: str, prompt: int) -> None:
    """Attention takes three and products two; one more where the head has other bits than the blocks, one where a
    window's pages are quantized, and two where prompts are compensated together: docs/decisions.md."""
    recipe = MODELS[model][1]
    single = ALWAYS | (TOGETHER if prompt else set()) | ({"_flush_kernel"} if kv in ("int4", "hierarchical") else set())
    products = 2 + (recipe.layer_bits("head") != recipe.bits)
    found = cases[model, kv, prompt]
    assert found.variants == {**dict.fromkeys(single, 1), "_attend_kernel": 3, "_gemv_kernel": products}


@pytest.mark.slow
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_launches_fourteen_kernels_a_layer(cases: Cases, model: str, kv: str) -> None:
    """Four products and their compensations, two norms, heads, attention and its merge, the gate; the last norm and the
    head with its compensation."""
    assert cases[model, kv, 0].launches == 14 * MODELS[model][0].num_layers + 3


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", COUNTED)
def test_a_step_of_several_rows_launches_what_the_model_of_its_time_says(by_rows: Cases, model: str, rows: int) -> None:
    """docs/kernels.md: compensation takes four launches instead of one, and 9 to 16 rows two for each product."""
    spec = MODELS[model][0]
    head = 4 * rows * 16 * spec.hidden_size // 1024 * spec.vocab_size // 8 <= COPIED_BYTES
    assert by_rows[model, "int4", 0, rows].launches == launches(spec.num_layers, rows, head=head).total
