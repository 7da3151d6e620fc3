"""Memory of the GPU backend: the plan against a counting allocator, and a load after an unload."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.architecture import step_graph
from models.spec import MixtureSpec
from runtime.backends import ModelSizes, backend
from runtime.backends.decoder import DecoderOptions
from runtime.backends.triton import card as reclaiming
from runtime.backends.triton import model as placing
from runtime.backends.triton.buffers import Buffers
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.forward import Pass
from runtime.backends.triton.layout import repack
from runtime.backends.triton.sampling import numbers_of
from runtime.backends.triton.sizes import COPIED_BYTES, buffer_sizes, chunk_numbers, linear_bytes
from runtime.errors import OutOfMemoryError
from runtime.load.memory import MemoryPlan, plan
from runtime.text.sampling import SamplingOptions
from tests.grid import grid
from tests.runtime.backends.triton.counting import META, Card, counted
from tests.runtime.backends.triton.shapes import FLASH, MODELS, QWEN35, Shapes, residuals, without_numbers
from tests.runtime.conftest import make_model, make_spec, pack_codebook_linear, pack_linear
from tuner.detect import MemoryInfo

GROWTH = 1 << 20
"""Bytes that first steps may add to what was allocated: counters, and channels that were chosen."""

SEGMENTS = 22 << 20
"""Bytes of the allocator's last segments, of 20 and of 2 MiB, that may be empty but for a little."""


DRAWS = (
    SamplingOptions(temperature=0, repetition_penalty=1.1, logprobs=20),
    SamplingOptions(top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=20),
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card of which every allocation is counted, on which models without numbers are placed."""
    monkeypatch.setattr(placing, "repack", without_numbers)
    monkeypatch.setattr(placing, "load_residuals", residuals)
    with counted() as found:
        yield found


def run(decoder: TritonDecoder, M: int, R: int, way: Any, *, draft: bool = False) -> None:
    """One step's launches."""
    made = Pass(decoder.model, decoder.buffers, M=M, R=R, way=way, draft=draft, side=None)
    made.finish(made.run(step_graph(decoder.spec)))


def steps(decoder: TritonDecoder) -> None:
    """What a chat runs: prompts on both sides of kernels' borders, decoded tokens, checks of drafts, draws."""
    rows = decoder.options.max_rows
    for M in (*range(2, 10), *(size + more for size in (16, 24, 32, 64, 96) for more in (0, 1)), rows):
        run(decoder, M, 1, "none")
    for M in range(1, 9):
        run(decoder, M, M, "rows")
    run(decoder, 1, 1, "rows", draft=True)
    logits = torch.empty(decoder.spec.vocab_size, device=META)
    for options in DRAWS:
        uniform = torch.zeros(1, dtype=torch.float64, device=META)
        numbers_of(logits, options, uniform, torch.zeros(64, dtype=torch.int64, device=META))


def within(planned: int, taken: int, percent: float = 5.0) -> None:
    assert abs(planned - taken) <= percent / 100 * taken, (planned, taken)


def planned_for(case: str, options: DecoderOptions, free: int) -> MemoryPlan:
    """What a load of these options is planned to take, where so much is free."""
    spec, recipe = MODELS[case]
    footprint = backend("triton").footprint(spec, ModelSizes(weight_bytes=0, recipe=recipe), compensated=True)
    memory = MemoryInfo(total_bytes=free, available_bytes=free, limit_bytes=None)
    return plan(spec, footprint, kv=options.kv, context=options.context, memory=memory)


@pytest.mark.parametrize("case", grid(MODELS, {"demo", "phi-3-4bit", "qwen3.5-4b-4bit", "gemma-4-e2b-4bit"}))
def test_the_plan_is_what_is_allocated(card: Card, case: str) -> None:
    """Weights, cache and buffers each within 5 % of what was asked for, and all of it with the peak."""
    spec, recipe = MODELS[case]
    options = DecoderOptions(context=min(8192, spec.max_context), k_chunk=16, kv="int8")
    planned = planned_for(case, options, 64 << 30)
    decoder = TritonDecoder(Shapes(spec, recipe), options, META)
    held = card.requested
    steps(decoder)
    scales = [linear.residual.scales for linear in decoder.model.linears.values() if linear.residual is not None]
    model = decoder.model
    weights = sum(linear.weight.nbytes for linear in model.linears.values())
    weights += sum(router.weight.nbytes for router in model.routers.values())
    weights += sum(norm.nbytes for norm in model.norms.values())
    if spec.mixture is None:
        assert weights == decoder.weight_bytes, "a token reads all weights"
    else:
        assert weights > 5 * decoder.weight_bytes, "a token reads those of its experts"
    weights += sum(scale.nbytes for scale in scales if scale is not None)
    assert planned.weight_bytes == weights
    within(planned.kv_bytes, decoder.kv_bytes)
    shared = decoder.model.copied.nbytes
    within(planned.buffer_bytes, card.peak - weights - decoder.kv_bytes - shared)
    assert shared <= COPIED_BYTES
    assert card.requested <= held + GROWTH, "steps hold more than what was allocated when the model was loaded"
    total = planned.needed_bytes - planned.margin_bytes + shared
    within(total, card.peak)
    assert card.reserved <= 1.05 * total + SEGMENTS


def test_unloading_returns_everything_and_the_next_load_is_planned_with_it(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that do not fit beside each other, on a card of 6 GiB; whoever still holds the first holds nothing."""
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", card.empty_cache)
    monkeypatch.setattr(reclaiming, "empty_host_cache", lambda: emptied.append("page-locked memory"))
    total, options = 6 << 30, DecoderOptions(context=4096, k_chunk=16, kv="int8")
    held = []
    for case in ("llama-3-8b-3bit", "phi-3-4bit", "llama-3-8b-3bit"):
        planned = planned_for(case, options, total - card.reserved)
        assert planned.needed_bytes > total // 2
        decoder = TritonDecoder(Shapes(*MODELS[case]), options, META)
        run(decoder, options.max_rows, 1, "none")
        run(decoder, 1, 1, "rows")
        assert card.reserved > 2 << 30
        if len(held) == 1:
            with pytest.raises(OutOfMemoryError):
                planned_for("llama-3-8b-3bit", options, total - card.reserved)
        decoder.close()
        decoder.close()
        held.append(decoder)
        assert (card.requested, card.reserved) == (0, 0)
    assert emptied == ["page-locked memory"] * 3


@pytest.mark.parametrize("case", MODELS)
def test_buffers_are_those_that_were_counted(case: str) -> None:
    spec = MODELS[case][0]
    for trellis in (False, True):
        model: Any = SimpleNamespace(spec=spec, device=META, token_group=None, trellis=trellis)
        buffers = Buffers(model, 40)
        held = sum(tensor.nbytes for tensor in buffers._flat.values()) + buffers.main.nbytes
        assert held == buffer_sizes(spec, 40, trellis=trellis).nbytes


def test_buffers_hold_the_widest_layer() -> None:
    """Layers whose mixers differ, in a mixture, which has no wider MLP."""
    mixture = MixtureSpec(experts=8, chosen=1, width=64, normalized=True)
    spec = replace(QWEN35, mixture=mixture, vocab_size=1000)
    sizes, rows = buffer_sizes(spec, 32), 32
    N, K = spec.linear_shape("layers.0.qkv")
    assert spec.linear_shape("qkv")[0] < N
    assert (sizes.output, sizes.inputs) == (rows * N, rows * max(K, spec.linear_shape("layers.0.o")[1]))


def test_buffers_hold_queries_that_are_made_of_a_latent() -> None:
    """Of many rows, beside what they are made of; of a few, their compensation."""
    spec = replace(FLASH, mixture=None, intermediate_size=64, vocab_size=1000)
    sizes, rows = buffer_sizes(spec, 32), 32
    kept, _ = spec.linear_shape("layers.0.qkv")
    assert (sizes.output, sizes.kept) == (rows * spec.q_width, rows * kept)
    assert (sizes.compensation, sizes.kept_compensation) == (8 * spec.q_width, 8 * kept)


def test_scratch_holds_the_chunks_of_the_longest_step() -> None:
    """Where attention, whose heads are narrow, needs less of it."""
    assert QWEN35.delta is not None
    narrow, rows = replace(QWEN35, head_dim=16), 1024
    assert buffer_sizes(narrow, rows).scratch == rows * chunk_numbers(QWEN35.delta)


@pytest.mark.parametrize(
    ("bits", "codebook", "N", "K"), [(3, False, 40, 96), (4, False, 7, 600), (4, True, 33, 512), (3, True, 8, 64)]
)
def test_weights_are_counted_as_they_are_laid_out(bits: int, codebook: bool, N: int, K: int) -> None:
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    packed = (pack_codebook_linear if codebook else pack_linear)(weight, bits=bits)
    placed = repack(packed, "cpu")
    assert placed.nbytes == linear_bytes((N, K), bits, placed.group_size, bias=placed.bias is not None)


@pytest.mark.gpu
def test_a_card_has_as_much_free_after_an_unload_as_before(cuda: str) -> None:
    """Two loads, both unloaded; the first one's context and modules stay, as they are the process's."""
    spec = make_spec(
        hidden_size=2048, intermediate_size=4096, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=128,
        vocab_size=32000, max_context=8192,
    )  # fmt: skip
    model, options = make_model(spec, bits=4), DecoderOptions(context=8192, slots=4, k_chunk=64)
    free = []
    for _ in range(3):
        decoder = backend("triton").open(model, options)
        loaded = backend("triton").probe().memory
        decoder.close()
        after = backend("triton").probe().memory
        assert loaded is not None
        assert after is not None
        assert after.available_bytes - loaded.available_bytes > decoder.kv_bytes
        free.append(after.available_bytes)
    assert free[2] >= free[1] >= free[0] - (4 << 20)
