"""Models whose layers have states, on the GPU decoder against the reference decoder: interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.spec import MixtureSpec, RopeSpec
from runtime.backends.decoder import DecoderOptions
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.kv import states as snapshots
from runtime.kv.states import states_bytes
from tests.grid import grid
from tests.runtime.backends.steps import beyond_half, rows
from tests.runtime.backends.triton.decoding import (
    assert_logits,
    assert_replayed,
    assert_same,
    both,
    copy_cache,
    read_prompt,
    reference,
    step,
    text,
)
from tests.runtime.backends.triton.test_recurrent_triton import NARROW
from tests.runtime.engine.talking import Talk, decaying

SLOW = pytest.mark.slow
SHAPES: dict[str, dict[str, Any]] = {
    "convolution": {
        "mixers": ("convolution", "attention"),
        "num_layers": 2,
        "conv_bias": True,
        "conv_kernel_size": 3,
        "windows": (None, 3),
        "gated": True,
        "head_gates": True,
    },
    "beside-attention": {
        "mixers": ("both",),
        "num_layers": 1,
        "delta": replace(NARROW, mamba=True, normed=False),
        "conv_kernel_size": 3,
    },
    "delta": {"mixers": ("delta", "attention"), "num_layers": 2, "delta": NARROW, "gated": True, "conv_kernel_size": 3},
}
HISTORIES = 2
"""Of each shape, some ten seconds each."""
HEADS = {"qk_norm": True, "rope": RopeSpec(rotary_dim=12), "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture
def stateful(small: Any) -> Any:
    """Makes models of a shape, whose states forget."""

    def make(shape: str, changes: dict[str, Any] | None = None, **build: Any) -> Any:
        return decaying(small({**HEADS, **SHAPES[shape], **(changes or {})}, **build))

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_beyond_half_precision_are_no_damage(stateful: Any, device: str, shape: str) -> None:
    decoder = TritonDecoder(beyond_half(stateful(shape, bits=4)), DecoderOptions(context=48, max_rows=20), device)
    for one in (step([5, 9, 3, 47, 12], 0, prefill=True), step([4], 5)):
        assert np.isfinite(decoder.forward(one)).all()


@pytest.mark.parametrize("shape", grid(SHAPES, {"delta"}))
def test_logits_match_the_reference(stateful: Any, device: str, shape: str) -> None:
    """A prompt, compensated tokens, two sequences at once in place of the latest, and a prompt absorbed at once."""
    model = stateful(shape, bits=4)
    options = DecoderOptions(context=48, slots=2, max_rows=20, k_chunk=300, prompt_k_chunk=200, select="static")
    ours, theirs = both(model, options, device)
    steps = (
        step([5, 9, 3, 47, 12], 0, rows=[1, 4], prefill=True),
        step([4, 4], 0, slot=1, compensate=False),
        step([33, 34, 35], 5, rows=[0, 2]),
        rows([7, 8], [0, 1], [7, 2]),
        step(text(17), 8, rows=[0, 16], prefill=True),
        step([21], 25),
    )
    assert_same(ours, theirs, steps)
    assert ours.kv_bytes - ours.cache.store.nbytes == states_bytes(model.spec, 2)


@SLOW
def test_experts_follow_layers_with_states(stateful: Any, device: str) -> None:
    """As in mixtures of this kind: experts in every block, and a shared one with a gate."""
    mixture = MixtureSpec(experts=4, chosen=2, width=32, normalized=True, shared=1)
    model = stateful("delta", {"mixture": mixture}, bits=4)
    options = DecoderOptions(context=24, max_rows=18, k_chunk=300, select="static")
    ours, theirs = both(model, options, device)
    for one in (step(text(18), 0, prefill=True), step([17], 18), step([5, 8], 18)):
        found, wanted = np.array(ours.forward(one)), theirs.forward(one)
        assert np.abs(found - wanted).mean() <= 0.02 * wanted.std()


@pytest.mark.parametrize(
    ("kv", "tolerance"),
    [
        ("int4", 0.1),
        pytest.param("int8", 3e-2, marks=SLOW),
        pytest.param("hierarchical", 2e-2, marks=SLOW),
        pytest.param("kivi2", 0.1, marks=SLOW),
        pytest.param("gear4", 6e-2, marks=SLOW),
    ],
)
def test_states_stand_beside_every_cache(stateful: Any, device: str, kv: Any, tolerance: float) -> None:
    """A prompt that fills pages goes through the reference; its cache and states are then loaded here."""
    model = stateful("delta", bits=4)
    options = DecoderOptions(context=300, slots=2, max_rows=128, kv=kv)
    ours, theirs = both(model, options, device)
    at = 136 if kv != "hierarchical" else 264
    read_prompt(theirs, text(at))
    copy_cache(theirs, ours, slot=1)
    ours.cache.fork(1, 0, at)
    ours.cache.clear(1)
    assert ours.cache.slot_bytes(0) == theirs.cache.slot_bytes(0)
    steps = (step([17], at), step([33, 34, 5], at + 1, rows=[0, 2]), step([21], at + 2))
    assert_same(ours, theirs, steps, tolerance)


def test_a_sequence_is_cut_back_forked_and_saved(stateful: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of states alone; after everything the next token is the one that a fresh prefill gives."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 8)
    model = stateful("delta", {"num_layers": 1, "mixers": ("delta",), "windows": (None,)}, residual_bits=0)
    ours = TritonDecoder(model, DecoderOptions(context=64, slots=2, max_rows=20), device)
    theirs, held = reference(model, DecoderOptions(context=64, max_rows=64)), [list[int](), list[int]()]

    def follows(slot: int, start: int, count: int, **how: bool) -> None:
        held[slot][start:] = np.random.default_rng(100 * slot + start).integers(3, 61, count).tolist()
        found = np.array(ours.forward(step(held[slot][start:], start, slot=slot, **how)))
        theirs.cache.clear(0)
        assert_logits(found, theirs.forward(step(held[slot], 0, prefill=True)))

    cache = ours.cache
    follows(0, 0, 17, prefill=True)
    follows(0, 17, 1)
    for position in (18, 19):
        follows(0, position, 1, draft=True)
    follows(0, 18, 3)
    follows(0, 20, 17, prefill=True)
    assert [cache.reach(0, length) for length in (37, 36, 17)] == [37, 18, 0]
    cache.fork(0, 1, 18)
    held[1] = held[0][:18]
    follows(1, 18, 1)
    cache.trim(0, 18)
    follows(0, 18, 2)
    pieces = [{name: np.array(x) for name, x in piece.items()} for piece in cache.export(0)]
    cache.load(1, 20, cache.paged_length(0), pieces)
    held[1] = held[0][:20]
    follows(1, 20, 1)
    assert cache.reach(1, 19) == 18, "snapshots are saved, too"


@SLOW
@pytest.mark.parametrize("shape", SHAPES)
def test_any_history_gives_what_a_fresh_prefill_gives(
    stateful: Any, device: str, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Prompts, edits, branches, rejected drafts, saved chats, each compared with the reference decoder's prefill."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 8)
    model, reused = stateful(shape, {"max_context": 256}, residual_bits=0), 0
    for seed in range(HISTORIES):
        make = lambda *how: TritonDecoder(*how, device)  # noqa: E731
        talk = Talk(make, model, seed, 0.01, fresh=ReferenceDecoder, longest=27, checked=6)
        talk.run(3)
        reused += talk.reused
    assert reused > 10 * HISTORIES


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replayed_graph_reads_what_waits(stateful: Any, cuda: str, shape: str) -> None:
    """One graph for a token, whether the one before it waits, was cut off, or is another sequence's."""
    model = stateful(shape, bits=4)
    options = DecoderOptions(context=100, slots=2, max_rows=4)
    captured, launched = TritonDecoder(model, options, cuda), TritonDecoder(model, options, cuda)
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (1, 1), (0, 3), (0, 4), (1, 2)]
    steps = (step([(11 * turn) % 61], position, slot=slot) for turn, (slot, position) in enumerate(places))
    assert_replayed(captured, launched, steps)


@pytest.mark.gpu
def test_a_replayed_graph_of_a_prompt_reads_chunks_of_any_sequence(stateful: Any, cuda: str) -> None:
    """One graph for whole steps of prompts, at the beginning, behind absorbed rows, and behind a token that waits."""
    model = stateful("delta", bits=4)
    options = DecoderOptions(context=100, slots=2, max_rows=20)
    captured, launched = TritonDecoder(model, options, cuda), TritonDecoder(model, options, cuda)
    places = [(0, 0, 20), (1, 0, 20), (0, 20, 20), (0, 40, 1), (0, 41, 20), (1, 20, 20)]
    for turn, (slot, position, count) in enumerate(places):
        tokens = [(11 * turn + 7 * row) % 61 for row in range(count)]
        one = step(tokens, position, rows=[count - 1], slot=slot, prefill=count > 1)
        assert_replayed(captured, launched, [one])
