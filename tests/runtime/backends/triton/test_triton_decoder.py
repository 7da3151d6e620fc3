"""The GPU decoder against the reference decoder: interpreted without a GPU, compiled and captured on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.packed import KeyStatistics, tensor_shape
from models.spec import HeadShape, LatentSpec, RopeSpec
from runtime.backends.decoder import DecoderOptions, DrawsTokens
from runtime.backends.triton import model as placing
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.residual import LoadedResiduals
from runtime.errors import InvalidActivationError, RequestError
from runtime.kv.kinds import PARTS
from runtime.text.sampling import Sampler, SamplingOptions, log_probabilities
from tests.grid import grid
from tests.runtime.backends.steps import beyond_half
from tests.runtime.backends.triton.decoding import (
    assert_logits,
    assert_same,
    behind_pages,
    both,
    copy_cache,
    read_prompt,
    step,
    text,
)
from tests.runtime.conftest import BEHIND, BOTH_SIDES, LATENTS, LOCAL, SHARED, SINKS, TURNED

WIDE: dict[str, Any] = {
    **BOTH_SIDES,
    "num_layers": 2,
    "windows": (3, None),
    "wide_heads": HeadShape(4, 1, 40),
    "rope": RopeSpec(rotary_dim=12),
    "window_rope": LOCAL,
    "v_norm": True,
    "scaled": True,
}
"""Options of the dense models of Gemma 4's kind."""
SHARING: dict[str, Any] = {**SHARED, "num_layers": 3, "windows": (3, None, None), "mixers": SHARED["mixers"][:3]}
"""Of the small ones."""
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "3bit": ({"bits": 3, "residual_bits": 4}, {"num_heads": 3, "num_kv_heads": 1}),
    "biases-qknorm-window-nope": (
        {"bits": 4, "residual_bits": 2},
        {
            "num_layers": 2,
            "windows": (3, None),
            "nope_layers": (0,),
            **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), True),
        },
    ),
    "head-dim-80": ({"bits": 3, "residual_bits": 16}, {"head_dim": 80, "num_heads": 1}),
    "codebooks-partial-rope": (
        {"bits": 4, "residual_bits": 4, "codebook": True},
        {"qkv_bias": True, "rope": RopeSpec(rotary_dim=12)},
    ),
    "norms-on-both-sides": ({"bits": 4}, {"num_layers": 2, **BOTH_SIDES, "window_rope": LOCAL, "windows": (3, None)}),
    "norms-behind": ({"bits": 4}, {**BEHIND, "num_layers": 2, "num_heads": 3}),
    "sinks": ({"bits": 4}, {**SINKS, "num_layers": 2, "windows": (3, None)}),
    "norms-of-turned-heads": ({"bits": 4}, {**TURNED, "num_layers": 2, "head_dim": 48}),
    "codebooks-3bit": ({"bits": 3, "residual_bits": 8, "codebook": True}, {}),
    "heads-of-two-widths": ({"bits": 4, "residual_bits": 4}, WIDE),
    "shared-caches": ({"bits": 4, "residual_bits": 4}, SHARING),
    "latents": ({"bits": 4, "residual_bits": 4}, LATENTS),
    "latents-of-512": (
        {"bits": 4, "residual_bits": 4},
        {
            "num_kv_heads": 1,
            "head_dim": 576,
            "rope": RopeSpec(rotary_dim=64),
            "latent": LatentSpec(rank=512, key_dim=16, value_dim=16),
        },
    ),
    "relu2": ({"bits": 4}, {"activation": "relu2", "mlp_bias": True, "num_layers": 3, "bare": (1,)}),
    "attention-beside-mlp": ({"bits": 4}, {"parallel": True, "num_layers": 2, "windows": (3, None)}),
    "heads-that-differ": (
        {"bits": 4},
        {
            "num_layers": 2,
            "query_heads": (1, 3),
            "windows": (3, None),
            "gate_form": "softplus",
            **dict.fromkeys(("gated", "head_gates", "qk_norm"), True),
        },
    ),
    "xielu": ({"bits": 3, "residual_bits": 4}, {"activation": "xielu", "intermediate_size": 44}),
}


QUICK = set(SHAPES) - {"head-dim-80", "norms-behind", "codebooks-3bit", "shared-caches", "latents-of-512", "relu2"}
"""Prompts have two of the others, and norms on both sides stand for those behind; shared caches have a shorter test,
and latents of 512 one of their cache."""


@pytest.mark.parametrize("shape", grid(SHAPES, QUICK))
def test_logits_match_the_reference(small: Any, device: str, shape: str) -> None:
    """Prompt, a decoded token, a position written again, and in the first shape a second sequence between them.

    Static selection: a dynamic one may take another of two channels that are equal but for the last bit.
    """
    build, changes = SHAPES[shape]
    model = small(changes, **build)
    if "parallel" in changes:  # in one block both read what passed one norm
        model.vectors["layers.0.post_norm"] = model.vectors["layers.0.input_norm"]
    options = DecoderOptions(context=16, slots=2, max_rows=6, k_chunk=300, select="static")
    ours, theirs = both(model, options, device)
    steps = [
        step([5, 9, 3, 47, 12], 0, rows=[1, 4], compensate=False),
        step([17], 5),
        step([33, 34], 4, rows=[0, 1]),
    ]
    if shape == "3bit":
        steps.insert(1, step([4, 4, 60], 0, slot=1, rows=[], compensate=False))
        steps.append(step([21], 3, slot=1, compensate=False))
    assert_same(ours, theirs, steps)


def test_blocks_read_a_shared_cache_and_embeddings_of_their_own(small: Any, device: str) -> None:
    """A token, and one behind it, compensated."""
    model = small(SHARING, bits=4)
    options = DecoderOptions(context=16, k_chunk=300, select="static")
    assert_same(*both(model, options, device), (step([5], 0), step([17], 1)))


@pytest.mark.parametrize(
    ("shape", "kv"),
    [
        ("3bit", "int8"),
        ("norms-on-both-sides", "hierarchical"),
        *(pytest.param("shared-caches", kv, marks=pytest.mark.slow) for kv in ("fp16", "int4")),
    ],
)
def test_numbers_beyond_half_precision_are_no_damage(small: Any, device: str, shape: str, kv: str) -> None:
    """Norms' outputs, keys, values, gates, and what attention finds; read from codes of every kind of cache."""
    build, changes = SHAPES[shape]
    model = beyond_half(small(changes, **build))
    decoder = TritonDecoder(model, DecoderOptions(context=80, max_rows=72, kv=kv), device)
    prompt = [5, 9, 3, 47, 12] * 14
    for one in (step(prompt, 0, rows=[69], prefill=True), step([17], 70), step([33, 34], 71, rows=[0, 1])):
        assert np.isfinite(decoder.forward(one)).all()


SOME: dict[str, int] = {"qkv": 300, "o": 1024, "gate_up": 700, "down": 300, "head": 1}
ALL = {"o": 1024}
"""Channels that a prompt's rows share."""


@pytest.mark.parametrize(
    ("shape", "prompt"),
    [
        *(("3bit", SOME), ("head-dim-80", ALL), ("codebooks-3bit", SOME)),
        *(
            pytest.param(shape, SOME, marks=pytest.mark.slow)
            for shape in ("heads-of-two-widths", "shared-caches", "latents", "attention-beside-mlp")
        ),
    ],
)
def test_prompts_match_the_reference(small: Any, device: str, shape: str, prompt: dict[str, int]) -> None:
    """Some channels and all of them, residuals of 4, 16 and 8 bits, and a prompt's single row."""
    build, changes = SHAPES[shape]
    model = small(changes, **build)
    options = DecoderOptions(context=16, max_rows=6, k_chunk=300, prompt_k_chunk=prompt, select="static")
    ours, theirs = both(model, options, device)
    first = step([5, 9, 3, 47, 12], 0, rows=[1, 4], prefill=True)
    assert_same(ours, theirs, (first, step([17, 4], 5, prefill=True), step([18], 7, prefill=True), step([17], 8)))
    plain = TritonDecoder(model, DecoderOptions(context=16, max_rows=6), device)
    assert np.abs(np.array(plain.forward(first)) - np.array(ours.forward(first))).max() > 0


PROMPT = {"int8": 70, "int4": 70, "hierarchical": 256, "kivi2": 128, "gear4": 128}
"""Tokens after which a kind has a page, or cuts one off its window."""


@pytest.mark.parametrize(
    ("kv", "tolerance"),
    [
        ("int8", 3e-2),
        ("int4", 0.1),
        ("hierarchical", 2e-2),
        pytest.param("kivi2", 0.1, marks=pytest.mark.slow),
        ("gear4", 6e-2),
    ],
)
def test_logits_match_the_reference_on_every_cache(small: Any, device: str, kv: Any, tolerance: float) -> None:
    """A prompt that fills pages, a decoded token, a few drafted ones, and one in place of the second of them.

    The interpreter takes long for a prompt's rows, so only INT4's goes through it; the others' comes from the
    reference, whose layout is the same. A number between two codes may be rounded to either, as its last bits fall:
    with 4 bits, one in a hundred is, and is then a 15th of its vector's range off.
    """
    model = small(bits=4)
    options = DecoderOptions(context=300, slots=2, max_rows=128, kv=kv)
    ours, theirs = both(model, options, device)
    prompt, at = text(PROMPT[kv]), PROMPT[kv]
    if kv == "int4":
        assert_same(ours, theirs, [step(prompt, 0)], tolerance)
    else:
        read_prompt(theirs, prompt)
        copy_cache(theirs, ours)
    steps = (step([17], at), step([33, 34, 5], at + 1, rows=[0, 2]), step([21], at + 2))
    assert_same(ours, theirs, steps, tolerance)
    assert ours.cache.slot_bytes(0) == theirs.cache.slot_bytes(0)
    assert ours.kv_bytes == theirs.kv_bytes


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{**SHARED, "windows": (150, None, 150, None)}, LATENTS], ids=["shared", "latents"])
@pytest.mark.parametrize("kv", ["fp16", "int4", "hierarchical", "kivi2", "gear4"])
def test_heads_of_two_widths_and_latents_are_read_from_every_cache(
    small: Any, device: str, changes: Any, kv: Any
) -> None:
    """Behind a prompt that fills a page or cuts one off its window: a token, drafts, a few rows in place of them, and
    one in place of the last, compensated."""
    model = small(changes)
    for shape in (tensor_shape(model.spec, layer) for layer in model.spec.attention_layers):
        axis, mean = np.random.default_rng(shape).standard_normal((2, *shape)).astype(np.float32)
        model.keys.append(KeyStatistics(mean, axis / np.linalg.norm(axis, axis=-1, keepdims=True)))
    ours, theirs, at = behind_pages(model, kv, device)
    steps = (
        step([17], at),
        step([18], at + 1, draft=True),
        step([19], at + 2, draft=True, flush=False),
        step([33, 34, 5], at + 1, rows=[0, 2]),
        step([21], at + 3),
    )
    # A key between two codes may be rounded to either: with 4 bits, that is a 15th of its vector's range.
    assert_same(ours, theirs, steps, 3e-2)
    assert ours.cache.slot_bytes(0) == theirs.cache.slot_bytes(0)
    assert ours.kv_bytes == theirs.kv_bytes


def test_a_draft_reads_the_upper_plane_alone(small: Any, device: str) -> None:
    """As much as a full read does where the lower plane is zero; one token, and a few."""
    model = small(bits=4)
    options = DecoderOptions(context=300, max_rows=128, kv="hierarchical")
    ours, theirs = both(model, options, device)
    read_prompt(theirs, text(256))
    copy_cache(theirs, ours)
    tokens = [[17], [33, 34]]
    full = [np.array(ours.forward(step(each, 256))) for each in tokens]
    draft = [np.array(ours.forward(step(each, 256, draft=True))) for each in tokens]
    ours.set_sensitive_layers(range(model.spec.num_layers))
    assert np.array_equal(full[0], ours.forward(step(tokens[0], 256, draft=True)))
    ours.set_sensitive_layers([])
    assert np.array_equal(draft[0], ours.forward(step(tokens[0], 256, draft=True)))
    for part in PARTS:
        ours.cache.store.fields(part, ours.cache.store.pools[part])["lower"].zero_()
    for each, whole, half in zip(tokens, full, draft, strict=True):
        assert_logits(half, np.array(ours.forward(step(each, 256))))
        assert np.abs(half - whole).max() > 5e-2 * whole.std()


def test_a_changed_k_chunk_gives_what_a_load_with_it_gives(small: Any, device: str) -> None:
    """What the reference gives, and bit for bit what a fresh load does."""
    model = small(bits=3)
    options = DecoderOptions(context=16, max_rows=4, select="approx")
    ours, theirs = both(model, options, device)
    found, one = {}, step([11], 0)
    for wanted in ({"qkv": 100, "down": 400}, 0, 1024):
        ours.set_k_chunk(wanted, {"qkv": 2})
        theirs.set_k_chunk(wanted)
        found[str(wanted)] = np.array(ours.forward(one))
        assert_logits(found[str(wanted)], theirs.forward(one))
    assert np.array_equal(TritonDecoder(model, replace(options, k_chunk=1024), device).forward(one), found["1024"])
    assert not np.array_equal(found["0"], found["1024"])


def test_random_channels_follow_the_positions_of_the_rows(small: Any, device: str) -> None:
    """The head sees some of the rows only: each keeps the position that its channels are drawn for."""
    k_chunk = {"qkv": 100, "down": 400, "head": 300}
    options = DecoderOptions(context=16, max_rows=4, select="random", seed=3, k_chunk=k_chunk)
    assert_same(*both(small(bits=3), options, device), [step([5, 9, 3], 0, rows=[1, 2]), step([11], 3)])


def test_tokens_drawn_on_the_device_are_those_drawn_from_its_logits(small: Any, device: str) -> None:
    """Two rows, each by its own answer's sampler; one draw more or less than rows is refused."""
    decoder = TritonDecoder(small(bits=4), DecoderOptions(context=16, max_rows=4), device)
    assert isinstance(decoder, DrawsTokens)
    greedy, drawn = SamplingOptions(temperature=0, repetition_penalty=1.2), SamplingOptions(seed=8, logprobs=3)
    one = step([5, 9, 3], 0, rows=[0, 2])
    found = decoder.draw(one, [Sampler(options, [5, 9]).draw_inputs() for options in (greedy, drawn)])
    logits = np.array(decoder.forward(one))
    assert [each.token for each in found] == [
        Sampler(options, [5, 9]).draw(row) for options, row in zip((greedy, drawn), logits, strict=True)
    ]
    assert (found[0].logprob, len(found[1].ranked)) == (None, 3)
    assert found[1].logprob == pytest.approx(log_probabilities(logits[1], found[1].token, 0)[0], abs=1e-5)
    with pytest.raises(RequestError, match="one for each"):
        decoder.draw(one, [])


def test_recall_is_measured(small: Any, device: str) -> None:
    options = DecoderOptions(context=16, k_chunk=200, select="exact", measure_recall=True)
    decoder = TritonDecoder(small(bits=3), options, device)
    assert decoder.recall is None
    decoder.forward(step([1, 2], 0))
    assert decoder.recall == 1.0


def test_a_number_that_is_not_finite_is_an_error_and_leaves_no_trace(small: Any, device: str) -> None:
    model = small(bits=4)
    model.table[7] = np.nan
    decoder = TritonDecoder(model, DecoderOptions(context=16, k_chunk=64), device)
    before = np.array(decoder.forward(step([1], 0)))
    with pytest.raises(InvalidActivationError, match="not finite"):
        decoder.forward(step([7], 0))
    with pytest.raises(InvalidActivationError, match="not finite"):
        decoder.draw(step([7], 0), [Sampler(SamplingOptions(temperature=0)).draw_inputs()])
    assert np.array_equal(before, decoder.forward(step([1], 0)))


@pytest.mark.parametrize("shape", grid(["3bit", "shared-caches"], {"3bit"}))
def test_rows_behind_the_final_norm_match_the_reference(small: Any, device: str, shape: str) -> None:
    model = small(SHAPES[shape][1], bits=3)
    model.table[7] = np.nan
    options = DecoderOptions(context=16, max_rows=6)
    ours, theirs = both(model, options, device)
    for one in (step([5, 9, 3], 0, rows=[], prefill=True), step([47], 3, rows=[], prefill=True)):
        found, wanted = ours.hidden(one), theirs.hidden(one)
        assert found.shape == wanted.shape == (one.tokens.size, ours.spec.hidden_size)
        assert_logits(found, wanted)
    with pytest.raises(InvalidActivationError, match="not finite"):
        ours.hidden(step([7], 4, rows=[], prefill=True))


def test_what_cannot_be_run_is_refused(small: Any, device: str) -> None:
    model = small(bits=4, residual_bits=0)
    for options, words in (
        (DecoderOptions(context=0), "at least 1"),
        (DecoderOptions(context=16, k_chunk=8), "without residuals"),
        (DecoderOptions(context=16, k_chunk=2000), "0 to 1024"),
    ):
        with pytest.raises(RequestError, match=words):
            TritonDecoder(model, options, device)
    decoder = TritonDecoder(model, DecoderOptions(context=16, max_rows=2), device)
    for bad in (step([64], 0), step([1], 16), step([1], 0, slot=1), step([1, 2, 3], 0)):
        with pytest.raises(RequestError):
            decoder.forward(bad)
    with pytest.raises(RequestError, match="thread block"):
        TritonDecoder(small(), DecoderOptions(context=16, n_tb={"o": 0}), device)


HEAD = {"prompt_k_chunk": {"head": 8}}


@pytest.mark.parametrize(
    ("more", "prefill"), [({"k_chunk": 100}, False), (HEAD, True), ({"prompt_k_chunk": ALL}, True)]
)
def test_layers_whose_residuals_find_no_memory_run_without(
    small: Any, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: Any, prefill: bool
) -> None:
    """Page-locked memory ends: one warning, and the model answers as it would without compensation."""
    model, options, one = small(bits=3), DecoderOptions(context=16, max_rows=2), step([5, 9], 0, prefill=prefill)
    plain = np.array(TritonDecoder(model, options, device).forward(one))
    warning = "4 layers run without: no memory. To compensate all: close programs"
    monkeypatch.setattr(placing, "load_residuals", lambda *_: LoadedResiduals(layers={}, warning=warning))
    decoder = TritonDecoder(model, replace(options, **more), device)
    assert np.array_equal(plain, decoder.forward(one))
    if not prefill:
        decoder.set_k_chunk(200)
        assert np.array_equal(plain, decoder.forward(one))
    if more != HEAD:  # for which no layer's residuals are copied
        assert [record.message for record in caplog.records] == [warning]
        (problem,) = decoder.model.problems
        assert (problem.what, problem.fix) == ("4 layers run without: no memory", "To compensate all: close programs")


def test_rows_share_what_any_layer_fetches(small: Any, device: str) -> None:
    """A narrow layer was the first to be compensated: the memory is enough for the widest all the same."""
    model = small(bits=4, residual_bits=4)
    decoders = [
        TritonDecoder(model, DecoderOptions(context=16, max_rows=3, k_chunk=of), device) for of in ({"o": 8}, 8)
    ]
    decoders[0].set_k_chunk(8)
    first, other = (decoder.model.copied.numel() for decoder in decoders)
    assert first == other > model.linear("layers.0.o").residual.codes.size


def test_the_embedding_table_stays_where_it_is(small: Any, device: str) -> None:
    """A step takes its rows along, so no table is locked or copied; every step has its own."""
    model = small(bits=4)
    ours, theirs = both(model, DecoderOptions(context=16, max_rows=3), device)
    assert np.shares_memory(ours.model.tables["embeddings"], model.table)
    assert_same(ours, theirs, [step([5, 9, 3], 0, rows=[0, 2]), step([47], 3), step([9], 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["3bit", "heads-of-two-widths", "shared-caches", "latents", "attention-beside-mlp"])
def test_a_replayed_graph_computes_what_launches_do(small: Any, cuda: str, shape: str) -> None:
    model = small({**SHAPES[shape][1], "max_context": 1024}, bits=3)
    options = DecoderOptions(context=1024, k_chunk=128, n_tb={"down": 4})
    captured, launched = TritonDecoder(model, options, cuda), TritonDecoder(model, options, cuda)
    for position in range(300):
        if position % 50 == 49:
            k_chunk = (0, 128, {"qkv": 64, "head": 9})[position // 50 % 3]
            captured.set_k_chunk(k_chunk, {"down": 4})
            launched.set_k_chunk(k_chunk, {"down": 4})
        one = step([position % 60], position)
        found = np.array(captured.forward(one))
        assert np.array_equal(found, launched.start(one).cpu().numpy()), position
        options = SamplingOptions(seed=position, temperature=0.9, top_k=30)
        (drawn,) = captured.draw(one, [Sampler(options).draw_inputs()])
        assert drawn.token == Sampler(options).draw(found[0])


@pytest.mark.gpu
def test_a_decoded_token_does_not_depend_on_what_ran_before(small: Any, cuda: str) -> None:
    """The same position decoded a thousand times, the two streams racing, always gives the same bits."""
    decoder = TritonDecoder(small(bits=3), DecoderOptions(context=16, k_chunk=512), cuda)
    first = np.array(decoder.forward(step([3], 0)))
    for _ in range(1000):
        assert np.array_equal(first, decoder.forward(step([3], 0)))
