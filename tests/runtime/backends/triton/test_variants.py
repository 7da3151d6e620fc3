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
MIXED = {
    **dict.fromkeys(("_group_kernel", "_sum_kernel"), 1),
    **dict.fromkeys(("_few_kernel", "_many_kernel", "_fetch_experts_kernel", "_route_kernel"), 2),
}
"""Further ones of a mixture: products and fetches of `gate_up` and `down`, and routers of a few rows and of many."""
MIXED_TOGETHER = {"_multiply_experts_kernel": 1, "_select_kernel": 3, "_fetch_experts_kernel": 3}
"""Of a mixture whose prompts are compensated together: few rows select among channels of all experts or of each, and
16 add to the product in place."""
STATES = {
    "delta": ("_mix_kernel", "_recur_kernel", "_relate_kernel", "_chunk_kernel", "_finish_kernel"),
    "convolution": ("_convolve_kernel",),
}
"""Further ones of layers with a state, by what mixes their tokens."""
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
def test_a_load_compiles_fifteen_to_twenty_one_kernels(cases: Cases, model: str, kv: str, prompt: int) -> None:
    """Attention takes three, and three more where only some blocks have a window, and products two; one more where the
    head has other bits than the blocks, one where a window's pages are quantized, and two where prompts are compensated
    together: docs/decisions.md. Experts take ten, and four more in prompts, delta rules five, and convolutions one.
    Over wide heads in half precision, attention of a few rows is that of many."""
    spec, recipe = MODELS[model]
    single = ALWAYS | (TOGETHER if prompt else set()) | ({"_flush_kernel"} if kv in ("int4", "hierarchical") else set())
    products = 2 + (recipe.layer_bits("head") != recipe.bits)
    mixed = (MIXED | (MIXED_TOGETHER if prompt else {})) if spec.mixture is not None else {}
    single |= {kernel for mixer in {*spec.mixers} for kernel in STATES.get(mixer, ())}
    each = 2 if kv == "fp16" and spec.head_dim > 128 else 3
    attention = each * len({spec.windows[layer] is None for layer in spec.attention_layers})
    found = cases[model, kv, prompt]
    assert found.variants == {
        **dict.fromkeys(single, 1), "_attend_kernel": attention, "_gemv_kernel": products, **mixed,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_launches_fourteen_kernels_a_layer(cases: Cases, model: str, kv: str) -> None:
    """Four products and their compensations, two norms, heads, attention and its merge, the gate; the last norm and the
    head with its compensation. With experts a router, and two compensations that take two launches. A delta rule takes
    three launches as attention does, a convolution one."""
    spec = MODELS[model][0]
    each = 14 if spec.mixture is None else 17
    saved = 2 * sum(spec.mixer(layer) == "convolution" for layer in range(spec.num_layers))
    assert cases[model, kv, 0].launches == each * spec.num_layers - saved + 3


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", COUNTED)
def test_a_step_of_several_rows_launches_what_the_model_of_its_time_says(by_rows: Cases, model: str, rows: int) -> None:
    """docs/kernels.md: compensation takes four launches instead of one, and 9 to 16 rows two for each product."""
    spec = MODELS[model][0]
    head = 4 * rows * 16 * spec.hidden_size // 1024 * spec.vocab_size // 8 <= COPIED_BYTES
    assert by_rows[model, "int4", 0, rows].launches == launches(spec.num_layers, rows, head=head).total
