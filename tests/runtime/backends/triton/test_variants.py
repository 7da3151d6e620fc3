"""Kernels that a load compiles: one to three seconds each, the first time on a machine."""

from __future__ import annotations

import pytest

from models.spec import HeadShape, expert_of
from runtime.backends.triton.kernels.attention import SPLIT_ROWS, WIDE_TILE_ROWS, WIDEST
from runtime.backends.triton.kernels.gemv import TILE_ROWS
from runtime.backends.triton.sizes import BLOCK, COPIED_BYTES, PIECE, pieces
from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import Case, Counts, counted_apart

ROWS = (1, 2, 4, 8, 16)
"""Rows of a step."""
KINDS = ("fp16", "int8", "int4", "hierarchical")
COUNTED = ("demo", "llama-3-8b-3bit")
"""Models whose launches are counted by rows."""
WAYS = (*((kv, 0) for kv in KINDS), ("int4", 16))
"""Kinds of caches, and channels of 1024 by which the rows of prompts are compensated together; that takes the same
kernels over every kind."""
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
BESIDE = {"_add_norm_kernel": 3, "_gate_kernel": 2, "_gemm_kernel": 2, "_fetch_experts_kernel": 2}
"""Of a mixture beside an MLP: a norm of what only experts read, gates and products of both; its large vocabulary leaves
compensation room for 16 rows."""
OF_TOKENS = {"_add_norm_kernel": 4, "_gate_kernel": 2, "_token_gate_kernel": 1}
"""Of embeddings of the blocks' own, and MLPs of two widths: norms of the first embeddings and of the bare stream."""
STATES = {
    "delta": ("_mix_kernel", "_recur_kernel", "_relate_kernel", "_chunk_kernel", "_finish_kernel"),
    "convolution": ("_convolve_kernel",),
}
"""Further ones of layers with a state, by what mixes their tokens."""
Cases = dict[Case, Counts]


@pytest.fixture(scope="module")
def cases() -> Cases:
    return counted_apart([(name, kv, prompt) for name in MODELS for kv, prompt in WAYS])


@pytest.fixture(scope="module")
def by_rows() -> Cases:
    return counted_apart([(name, "int4", 0, rows) for name in COUNTED for rows in ROWS])


def alike(heads: HeadShape, kv: str) -> bool:
    """Whether attention of a few rows is that of many."""
    if kv == "fp16" and heads.dim > 128:
        return SPLIT_ROWS * heads.heads // heads.kv_heads >= WIDE_TILE_ROWS
    return heads.dim > WIDEST


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "prompt"), WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_load_compiles_fifteen_to_twenty_one_kernels(cases: Cases, model: str, kv: str, prompt: int) -> None:
    """Attention takes three, and three more where only some blocks have a window, and products two; one more where the
    head has other bits than the blocks, one where a window's pages are quantized, and two where prompts are compensated
    together: docs/decisions/gpu.md. Experts take ten, and four more in prompts, delta rules five, and convolutions one.
    Over wide heads in half precision, and over the widest, attention of a few rows is that of many. Heads of two widths
    have two kernels each, norms behind two, and products of rows that end at different places of a block, too."""
    spec, recipe = MODELS[model]
    single = ALWAYS | (TOGETHER if prompt else set()) | ({"_flush_kernel"} if kv in ("int4", "hierarchical") else set())
    names = [name for name in spec.linear_names() if expert_of(name) is None]
    tails = {pieces(spec.linear_shape(name)[1]) % (BLOCK // PIECE) for name in names} - {0}
    products = 2 * max(1, len(tails)) + (recipe.layer_bits("head") != recipe.bits)
    mixed = (MIXED | (MIXED_TOGETHER if prompt else {})) if spec.mixture is not None else {}
    single |= {kernel for mixer in {*spec.mixers} for kernel in STATES.get(mixer, ())}
    shapes = {(spec.heads_of(layer), spec.windows[layer] is None) for layer in spec.attention_layers}
    attention = sum(2 if alike(heads, kv) else 3 for heads, _ in shapes)
    by_heads = {"_heads_kernel", "_merge_kernel", "_flush_kernel"} & {*single}
    expected = dict.fromkeys(single, 1) | dict.fromkeys(by_heads, len({heads for heads, _ in shapes}))
    expected |= {"_attend_kernel": attention, "_gemv_kernel": products, **mixed}
    if spec.norm_after:
        expected["_add_norm_kernel"] = 2
    expected |= (OF_TOKENS if spec.token_width else {}) | (BESIDE if spec.mixture and spec.mixture.parallel_mlp else {})
    assert cases[model, kv, prompt].variants == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_launches_fourteen_kernels_a_layer(cases: Cases, model: str, kv: str) -> None:
    """Four products and their compensations, two norms, heads, attention and its merge, the gate; the last norm and the
    head with its compensation. With experts a router, and two compensations that take two launches. A delta rule takes
    three launches as attention does, a convolution one. Experts beside an MLP have that and a norm besides; embeddings
    of the blocks' own three products, a norm and a gate, and a launch at the beginning. Heads of two widths, norms of
    values and what multiplies a block take none."""
    spec = MODELS[model][0]
    each = 14 if spec.mixture is None else 23 if spec.mixture.parallel_mlp else 17
    each += 8 if spec.token_width else 0
    saved = 2 * sum(spec.mixer(layer) == "convolution" for layer in range(spec.num_layers))
    assert cases[model, kv, 0].launches == each * spec.num_layers - saved + 3 + (spec.token_width > 0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", COUNTED)
def test_a_step_of_several_rows_launches_what_its_products_and_their_compensation_take(
    by_rows: Cases, model: str, rows: int
) -> None:
    """A layer has four products, two norms, heads, attention and its merge, and the gate; the head a norm, a product.

    A product of 9 to 16 rows is two launches. Compensation is one for one row; for several, the selection, the union of
    what they chose, its copy, and the sums. The head's rows share what they fetch where there is room for it.
    """
    spec = MODELS[model][0]
    head = 4 * rows * 16 * spec.hidden_size // 1024 * spec.vocab_size // 8 <= COPIED_BYTES
    products, each = -(-rows // TILE_ROWS), 1 if rows == 1 else 4
    chain = spec.num_layers * (4 * products + 6) + products + 1
    compensation = each * (4 * spec.num_layers + 1) - (0 if head or rows == 1 else 2)
    assert by_rows[model, "int4", 0, rows].launches == chain + compensation
