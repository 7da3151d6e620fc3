"""Models whose blocks are shared by two backends, beside the same models on one.

Two parts on the same backend compute what it computes alone, bit for bit: the stream crosses the seam in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from models.part import part_of, seams
from models.spec import DeltaSpec, MixtureSpec, ModelSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.shared.decoder import SharedDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.compensation import k_chunk_within
from runtime.errors import RequestError
from tests.runtime.backends.steps import rows
from tests.runtime.backends.triton.conftest import DEVICE
from tests.runtime.backends.triton.decoding import LOGITS
from tests.runtime.conftest import LATENTS, SHARED, make_model, make_spec
from tests.runtime.engine.talking import Talk, decaying

OPEN: dict[str, Callable[..., Decoder]] = {
    "reference": ReferenceDecoder,
    "cpu": CpuDecoder,
    "triton": partial(TritonDecoder, device=DEVICE),
}
OPTIONS = DecoderOptions(
    kv="int4",
    context=128,
    slots=2,
    max_rows=24,
    threads=2,
    k_chunk={"qkv": 32, "down": 64, "head": 32, "layers.1.o": 128, "layers.2.o": 512},
    prompt_k_chunk=128,
    layers_on_device=2,
)
MIXTURE = MixtureSpec(experts=4, chosen=2, width=48, normalized=True, dense=(2,), shared=1)
DELTA = DeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 3, "windows": (None, 20, None), "nope_layers": (2,)},
    "mixture": {"num_layers": 3, "mixture": MIXTURE},
    "hybrid": {
        "num_layers": 4,
        "mixers": ("delta", "attention", "delta", "attention"),
        "delta": DELTA,
        "conv_kernel_size": 4,
        "gated": True,
        "qk_norm": True,
    },
    "latents": {**LATENTS, "num_layers": 3},
    "gemma4": {**SHARED, "num_layers": 5, "windows": (5, None, 5, None, 5), "logit_cap": 3.0, "mixers": (
        "attention", "attention", "attention", "attention", "shared")},
}  # fmt: skip


def opened(kind: str, *names: str, **changes: Any) -> Decoder:
    """A model on one backend, or shared by two."""
    model = decaying(make_model(make_spec(max_context=512, **MODELS[kind]), seed=4))
    options = replace(OPTIONS, **changes)
    if len(names) == 1:
        return OPEN[names[0]](model, replace(options, layers_on_device=None))
    return SharedDecoder(model, options, *(OPEN[name] for name in names))


def told(decoder: Decoder) -> Iterator[np.ndarray[Any, Any]]:
    """Logits of a history: prompts, two answers in a batch, drafts and their verification, a branch, a way back."""
    tokens = np.random.default_rng(7).integers(0, decoder.spec.vocab_size, 200)

    def run(step: Step) -> np.ndarray[Any, Any]:
        return np.array(decoder.forward(step))

    with decoder.session():
        for start in (0, 24, 48):
            yield run(Step.of(tokens[start : start + 24], start, [23], prefill=True))
        yield run(Step.of(tokens[100:110], 0, [9], slot=1, prefill=True))
        for at in range(72, 75):
            yield run(rows([tokens[at], tokens[at + 40]], [0, 1], [at, at - 62]))
        yield run(Step.of(tokens[75:76], 75, draft=True))
        yield run(Step.of(tokens[76:77], 76, draft=True, flush=False))
        yield run(Step.of(tokens[75:78], 75, flush=False))
        decoder.cache.trim(0, decoder.cache.reach(0, 76))
        decoder.cache.fork(0, 1, decoder.cache.length(0))
        at = decoder.cache.length(1)
        yield run(rows([3, 5], [0, 1], [at, at]))
        decoder.set_k_chunk({"layers.1.down": 256, "gate_up": 64})
        yield run(rows([6, 8], [0, 1], [at + 1, at + 1]))
        yield decoder.hidden(Step.of([9], at + 2, []))


ALONE = [
    pytest.param(kind, name, marks=[pytest.mark.slow] * (name == "reference"))
    for kind in MODELS
    for name in ("reference", "cpu")
]
INTERPRETED = [(kind, "triton") for kind in (MODELS if DEVICE == "cuda" else ("dense",))]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*ALONE, *(pytest.param(*own, marks=[pytest.mark.slow] * (DEVICE == "cpu")) for own in INTERPRETED)],
)
def test_two_parts_of_a_backend_are_one_model(kind: str, name: str) -> None:
    alone, shared = opened(kind, name), opened(kind, name, name)
    for turn, (found, wanted) in enumerate(zip(told(shared), told(alone), strict=True)):
        assert np.array_equal(found, wanted), turn


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "names",
    [
        ("reference", "cpu"),
        ("cpu", "reference"),
        pytest.param(("triton", "cpu"), marks=[pytest.mark.slow] * (DEVICE == "cpu")),
    ],
)
def test_parts_on_two_backends_compute_the_model(kind: str, names: tuple[str, str]) -> None:
    """Caches of 16 bits and every residual, so that nothing but the kernels' own rounding differs."""
    how: dict[str, Any] = {"kv": "fp16", "k_chunk": 1024, "prompt_k_chunk": 1024, "select": "exact"}
    alone, shared = (opened(kind, *own, **how) for own in (("reference",), names))
    step = Step.of(np.arange(20), prefill=True)
    found, wanted = (np.array(decoder.forward(step)) for decoder in (shared, alone))
    errors = np.abs(found - wanted).mean(axis=1) / wanted.std()
    assert np.median(errors) < 6 * LOGITS  # INT8 activations of the CPU's part; see `test_families_decoded`


def test_a_seam_keeps_blocks_with_the_cache_that_they_read() -> None:
    spec = make_spec(**SHARED)
    assert seams(spec) == (1,) or seams(spec) == ()
    gemma = make_spec(max_context=512, **MODELS["gemma4"])
    assert seams(gemma) == (1, 2)
    assert seams(make_spec(num_layers=3)) == (1, 2)
    model, where = make_model(gemma), replace(OPTIONS, layers_on_device=3)
    with pytest.raises(RequestError, match=r"cannot run 3 blocks of this model .* choose from 1 to 2"):
        SharedDecoder(model, where, ReferenceDecoder, ReferenceDecoder)


def test_parts_number_their_blocks_from_zero() -> None:
    spec = make_spec(num_layers=3, windows=(None, 7, 9), nope_layers=(0, 2), mixture=MIXTURE)
    rear = part_of(spec, 1, 3)
    assert (rear.windows, rear.nope_layers, rear.num_layers, rear.embeds, rear.has_head) == (
        (7, 9),
        (1,),
        2,
        False,
        True,
    )
    assert rear.mixture is not None
    assert rear.mixture.dense == (1,)
    assert rear.linear_names()[-1] == "head"
    assert part_of(spec, 0, 1).linear_names()[-1] != "head"
    assert k_chunk_within({"down": 4, "layers.2.down": 8, "layers.0.o": 3}, 1, 3) == {"down": 4, "layers.1.down": 8}
    assert whole(spec) == sum(part_of(spec, *own).parameters for own in ((0, 1), (1, 3)))


def whole(spec: ModelSpec) -> int:
    """Parameters of a model, whose embeddings and last norm each part counts."""
    return spec.parameters + 2 * spec.vocab_size * spec.hidden_size + spec.hidden_size


@pytest.mark.parametrize(("kind", "error"), [("hybrid", 0.06), ("gemma4", 0.06)])
def test_random_conversations_across_the_seam(kind: str, error: float) -> None:
    """Prompts in parts, branches, drafts that are rejected, caches saved and loaded; see `Talk`."""

    def shared(model: Any, options: DecoderOptions) -> Decoder:
        return SharedDecoder(model, replace(options, layers_on_device=2), ReferenceDecoder, CpuDecoder)

    talk = Talk(shared, decaying(make_model(make_spec(max_context=512, **MODELS[kind]))), 3, error)
    for _ in range(6):
        talk.run(2)
        talk.save_and_load()
    assert talk.reused > 0


def test_pieces_that_end_early_leave_both_parts_empty() -> None:
    decoder: Any = opened("dense", "reference", "cpu")
    decoder.forward(Step.of([1, 2, 3], prefill=True))
    pieces = [{name: np.array(array) for name, array in piece.items()} for piece in decoder.cache.export(0)]
    with pytest.raises(RequestError):
        decoder.cache.load(0, 3, 0, [*pieces[:-2]])
    assert [part.cache.length(0) for part in decoder.parts] == [0, 0]


def test_a_failure_between_the_parts_leaves_a_sequence_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Any = opened("dense", "reference", "reference")
    decoder.forward(Step.of([1, 2, 3], prefill=True))
    with monkeypatch.context() as broken:
        broken.setattr(decoder._rear, "forward", lambda _step: (_ for _ in ()).throw(KeyError("rear")))
        with pytest.raises(KeyError):
            decoder.forward(Step.of([4], 3))
    assert decoder.cache.length(0) == 3
    decoder.cache.trim(0, 3)
    found = np.array(decoder.forward(Step.of([4], 3)))
    fresh = opened("dense", "reference", "reference")
    fresh.forward(Step.of([1, 2, 3], prefill=True))
    assert np.array_equal(found, fresh.forward(Step.of([4], 3)))


def test_an_unplanned_share_and_a_stream_of_another_shape_are_refused() -> None:
    decoder: Any = opened("dense", "reference", "reference")
    with pytest.raises(RequestError, match="from a stream of 2 rows and 64 channels"):
        decoder.parts[1].forward(Step.of([1, 2]))
