"""The reference decoder: chunks and slots do not change the numbers, compensation restores the full precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.architecture import Node, step_graph
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder, _Pass
from runtime.errors import InvalidActivationError, RequestError
from tests.close import assert_close
from tests.runtime.backends.steps import rows
from tests.runtime.conftest import make_model, make_spec

TOKENS = [1, 7, 8, 9, 50, 95, 3, 3, 20, 41]


def run(decoder: ReferenceDecoder, tokens: list[int], *, start: int = 0, slot: int = 0, **options: Any) -> np.ndarray:
    return decoder.forward(Step.of(tokens, start, slot=slot, **options)).copy()


def options(**changes: Any) -> DecoderOptions:
    return DecoderOptions(**{"context": 32, **changes})


@pytest.mark.parametrize("kv", ["fp16", "int8"])
@pytest.mark.parametrize("window", [None, 4])
def test_any_chunking_gives_the_same_logits(kv: str, window: int | None) -> None:
    model = make_model(make_spec(windows=(window, None)))
    whole = run(ReferenceDecoder(model, options(kv=kv)), TOKENS)
    decoder = ReferenceDecoder(model, options(kv=kv))
    parts = [run(decoder, TOKENS[a:b], start=a) for a, b in ((0, 3), (3, 4), (4, 9), (9, 10))]
    assert_close(np.concatenate(parts), whole, "model")


def test_slots_do_not_see_each_other() -> None:
    model = make_model()
    decoder = ReferenceDecoder(model, options(slots=3))
    alone = [run(ReferenceDecoder(model, options()), tokens) for tokens in (TOKENS[:8], TOKENS[:1:-1])]
    step = rows([*TOKENS[:8], *TOKENS[:1:-1]], [2] * 8 + [0] * 8, [*range(8), *range(8)])
    assert np.array_equal(decoder.forward(step), np.concatenate(alone))


def test_writing_at_a_lower_position_cuts_the_sequence_back() -> None:
    decoder = ReferenceDecoder(make_model(), options())
    run(decoder, TOKENS)
    again = run(decoder, [60, 61], start=4)
    fresh = run(ReferenceDecoder(make_model(), options()), [*TOKENS[:4], 60, 61])[4:]
    assert_close(again, fresh, "model")


@pytest.mark.parametrize("select", ["approx", "random"])
def test_only_the_rows_asked_for_come_back(select: str) -> None:
    decoder = ReferenceDecoder(make_model(), options(k_chunk=64, select=select))
    every = run(decoder, TOKENS)
    assert_close(decoder.forward(Step.of(TOKENS, 0, [2, 9])), every[[2, 9]], "model")


class FullPrecision(_Pass):
    """The same pass on the weights before quantization."""

    full: dict[str, np.ndarray]

    def linear(self, node: Node) -> torch.Tensor:
        return self.of(node) @ torch.from_numpy(self.full[node.name]).T


@pytest.mark.parametrize("codebook", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_every_channel_at_8_bits_restores_full_precision(bits: int, codebook: bool) -> None:
    model = make_model(bits=bits, codebook=codebook)

    def error(k_chunk: int, **more: Any) -> float:
        logits = run(ReferenceDecoder(model, options(k_chunk=k_chunk, select="exact")), TOKENS, **more)
        return float(np.sqrt(np.mean((logits - full) ** 2)))

    oracle = FullPrecision(ReferenceDecoder(model, options()), Step.of(TOKENS))
    oracle.full = model.full
    full = oracle.run(step_graph(model.spec)).numpy()
    errors = [error(k_chunk) for k_chunk in (0, 64, 256, 1024)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 * errors[0]
    assert error(1024, compensate=False) == errors[0]


def test_compensated_rows_use_their_own_activations() -> None:
    model = make_model(bits=3)
    for select in ("approx", "exact", "static", "random"):
        whole = run(ReferenceDecoder(model, options(k_chunk=100, select=select)), TOKENS)
        decoder = ReferenceDecoder(model, options(k_chunk=100, select=select))
        single = np.concatenate([run(decoder, [token], start=i) for i, token in enumerate(TOKENS)])
        assert_close(whole, single, "half cache")  # halves of the cache may round the other way


def test_selectors_differ_and_recall_is_measured() -> None:
    model = make_model(bits=3)
    recalls = {}
    for select in ("approx", "exact", "static", "random"):
        decoder = ReferenceDecoder(model, options(k_chunk=128, select=select, measure_recall=True))
        assert decoder.recall is None
        run(decoder, TOKENS)
        recalls[select] = decoder.recall
    assert recalls["exact"] == 1.0
    assert recalls["random"] < 0.4 < recalls["approx"] < 1.0


def test_k_chunk_by_layer_type_touches_only_that_type() -> None:
    model = make_model(bits=3)
    base, head = (run(ReferenceDecoder(model, options(k_chunk=k)), TOKENS) for k in (0, {"head": 1024}))
    assert not np.allclose(base, head)
    np.testing.assert_array_equal(base, run(ReferenceDecoder(model, options(k_chunk={"down": 0})), TOKENS))


def test_compensation_without_residuals_is_refused() -> None:
    with pytest.raises(RequestError, match="without residuals"):
        ReferenceDecoder(make_model(residual_bits=0), options(k_chunk=8))
    assert ReferenceDecoder(make_model(residual_bits=0), options()).recall is None


def test_a_damaged_model_is_noticed() -> None:
    model = make_model()
    model.vectors["layers.1.post_norm"][3] = np.nan
    with pytest.raises(InvalidActivationError, match="logits"):
        run(ReferenceDecoder(model, options()), TOKENS)
    with pytest.raises(InvalidActivationError, match="channel"):
        run(ReferenceDecoder(model, options(k_chunk=8)), TOKENS)


def test_sizes_are_those_of_the_buffers() -> None:
    model = make_model()
    half, int8 = (ReferenceDecoder(model, options(kv=kv, slots=2, context=128)) for kv in ("fp16", "int8"))
    assert half.kv_bytes == 2 * 2 * 2 * 128 * 2 * 16 * 2  # K and V, layers, slots, context, heads, dim, bytes
    assert int8.kv_bytes == 2 * 2 * 2 * 128 * 2 * (16 + 4)
    packed = sum(p.codes.nbytes + p.scales.nbytes + p.zeros.nbytes for p in model.linears.values())
    assert half.weight_bytes == packed + 5 * 64 * 4
    half.close()
    half.close()
    model = make_model(codebook=True)
    packed = sum(p.codes.nbytes + p.scales.nbytes + p.codebook.nbytes for p in model.linears.values())
    assert ReferenceDecoder(model, options()).weight_bytes == packed + 5 * 64 * 4
