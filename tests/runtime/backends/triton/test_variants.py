"""Kernels that a load compiles, one to three seconds each the first time on a machine, and that a step launches."""

from __future__ import annotations

import pytest

from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import Case, Counts, counted_apart

pytestmark = pytest.mark.slow
LOADS: dict[str, tuple[int, int, int]] = {
    "demo": (17, 18, 42),
    "smollm2-3bit": (19, 19, 302),
    "llama-3-8b-3bit": (19, 19, 322),
    "phi-3-4bit": (17, 18, 322),
    "qwen3-30b-a3b-4bit": (27, 32, 722),
    "gpt-oss-20b-4bit": (30, 35, 362),
    "qwen3.5-4b-4bit": (22, 23, 322),
    "lfm2-1.2b-4bit": (18, 19, 142),
    "gemma-4-31b-4bit": (23, 24, 602),
    "gemma-4-e2b-4bit": (27, 28, 528),
    "gemma-4-26b-a4b-4bit": (40, 43, 572),
    "glm-4.7-flash-4bit": (27, 32, 843),
    "nemotron-3-nano-4bit": (32, 37, 383),
    "llama-3-8b-trellis": (17, 18, 322),
    "qwen3.5-4b-trellis": (24, 24, 322),
    "laguna-xs-4bit": (32, 37, 597),
    "falcon-h1-0.5b-4bit": (23, 24, 542),
    "command-r7b-trellis": (23, 23, 290),
    "gemma-4-e2b-trellis": (29, 29, 528),
}
"""Kernels over INT4, the same where the rows of prompts are compensated together, and launches of a token.

Attention takes three, and three more where only some blocks have a window, and products three; one more where the head
has other bits than the blocks, one where a window's pages are quantized, and two where prompts are compensated
together: docs/decisions/gpu.md. Experts take ten, and four more in prompts, delta rules five, and convolutions one.
Heads of two widths have two kernels each, norms behind two, and products of rows that end at different places, too;
queries with a latent have a norm, a product and heads of their own.

A layer launches 10: four products, which compensate in the same launch, two norms, heads, attention and its merge, the
gate; with experts a router, and two compensations of two launches. The last norm and the head are 2.
"""
CACHES = {
    ("demo", "fp16"): 16,
    ("demo", "hierarchical"): 17,
    ("gpt-oss-20b-4bit", "fp16"): 29,
    ("qwen3.5-4b-4bit", "fp16"): 20,
    ("qwen3.5-4b-4bit", "int8"): 21,
    ("gemma-4-31b-4bit", "fp16"): 21,
    ("gemma-4-e2b-4bit", "fp16"): 24,
    ("gemma-4-e2b-4bit", "int8"): 25,
    ("gemma-4-26b-a4b-4bit", "hierarchical"): 40,
}
"""Kernels over others. Over wide heads in half precision, and over the widest, a few rows take the kernel of many."""
ROWS = {
    ("demo", 2): 110,
    ("demo", 8): 110,
    ("demo", 16): 110,
    ("llama-3-8b-3bit", 8): 838,
    ("llama-3-8b-3bit", 16): 836,
}
"""Launches of a step of several rows. Compensation of several is four: the selection, the
union of what they chose, its copy, and the sums; the head's rows share what they fetch where there is room for it."""


@pytest.fixture(scope="module")
def counts() -> dict[Case, Counts]:
    cases: list[Case] = [(model, "int4", prompt, 1) for model in LOADS for prompt in (0, 16)]
    cases += [(model, kv, 0, 1) for model, kv in CACHES]
    return counted_apart([*cases, *((model, "int4", 0, rows) for model, rows in ROWS)])


@pytest.mark.parametrize("model", MODELS)
def test_a_load_compiles_few_kernels_and_a_token_launches_as_few(counts: dict[Case, Counts], model: str) -> None:
    alone, together = (counts[model, "int4", prompt, 1] for prompt in (0, 16))
    assert alone.total == LOADS[model][0], alone.variants
    assert together.total == LOADS[model][1], together.variants
    assert (alone.launches, together.launches) == (LOADS[model][2],) * 2


@pytest.mark.parametrize(("model", "kv"), CACHES)
def test_other_caches_take_about_as_many(counts: dict[Case, Counts], model: str, kv: str) -> None:
    found = counts[model, kv, 0, 1]
    assert (found.total, found.launches) == (CACHES[model, kv], LOADS[model][2]), found.variants


@pytest.mark.parametrize(("model", "rows"), ROWS)
def test_a_step_of_several_rows_launches_little_more(counts: dict[Case, Counts], model: str, rows: int) -> None:
    assert counts[model, "int4", 0, rows].launches == ROWS[model, rows]
