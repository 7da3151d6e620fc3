"""Every kind of cache under the reference decoder: steps, slots, rollbacks, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.errors import ContextOverflowError, RequestError
from runtime.kv.kinds import KINDS, KVKind
from runtime.measure.speed import fill, measure_at
from tests.close import assert_close
from tests.runtime.backends.steps import rows
from tests.runtime.conftest import make_model, make_spec

TOKENS = np.random.default_rng(5).integers(0, 96, 420).tolist()


def run(decoder: ReferenceDecoder, tokens: list[int], *, start: int = 0, slot: int = 0) -> np.ndarray:
    return decoder.forward(Step.of(tokens, start, slot=slot)).copy()


def in_steps(decoder: ReferenceDecoder, size: int, *, first: int = 0) -> np.ndarray:
    """All tokens in steps of so many rows, the first maybe shorter."""
    edges = sorted({0, *range(first, len(TOKENS), size), len(TOKENS)})
    return np.concatenate([run(decoder, TOKENS[a:b], start=a) for a, b in itertools.pairwise(edges)])


def options(**changes: Any) -> DecoderOptions:
    return DecoderOptions(**{"context": 512, **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(make_spec(max_context=512))


def test_steps_of_a_page_see_what_decoding_sees(model: Any) -> None:
    """Sums in another order turn a few codes over, which at 2 bits is seen; rows that see other tokens differ more.

    Pages are cut off behind 64 sinks.
    """
    decoded = in_steps(ReferenceDecoder(model, options(kv="kivi2")), 1)
    off = {}
    for name, size, first in (("page", 128, 64), ("quarter", 32, 0), ("crossing", 128, 114)):
        found = in_steps(ReferenceDecoder(model, options(kv="kivi2")), size, first=first)
        off[name] = float(np.median(np.abs(found - decoded)[128:]))
    assert off["page"] < 0.1 * off["crossing"]
    assert off["quarter"] < 0.1 * off["crossing"]


@pytest.mark.parametrize("kv", KINDS)
def test_slots_of_different_length_do_not_see_each_other(kv: KVKind, model: Any) -> None:
    decoder = ReferenceDecoder(model, options(kv=kv, slots=3))
    lengths = {0: 1, 1: 300, 2: 128}
    alone = {}
    for slot, length in lengths.items():
        single = ReferenceDecoder(model, options(kv=kv))
        for start in range(0, length, 128):
            run(decoder, TOKENS[start : min(start + 128, length)], start=start, slot=slot)
            run(single, TOKENS[start : min(start + 128, length)], start=start)
        alone[slot] = run(single, [7], start=length)
    found = decoder.forward(rows([7, 7, 7], [2, 0, 1], [128, 1, 300]))
    for row, slot in enumerate([2, 0, 1]):
        assert_close(found[row], alone[slot][0], "half cache")


@pytest.mark.parametrize("kv", KINDS)
def test_rolled_back_rows_leave_no_trace_and_a_fork_goes_on_as_its_source(kv: KVKind, model: Any) -> None:
    plain, rolled = (ReferenceDecoder(model, options(kv=kv, slots=2)) for _ in range(2))
    rng = np.random.default_rng(2)
    for start in range(0, 384, 128):
        for decoder in (plain, rolled):
            run(decoder, TOKENS[start : start + 128], start=start)
    plain.cache.fork(0, 1, 384)
    forked = run(plain, [3], start=384, slot=1)
    run(plain, [9], start=385, slot=1)
    np.testing.assert_array_equal(forked, run(plain, [3], start=384))
    for position in range(384, 390):
        wrong = rng.integers(0, 96, 4).tolist()
        found = run(rolled, [TOKENS[position], *wrong], start=position)[0]
        assert_close(found, run(plain, [TOKENS[position]], start=position)[0], "half cache")


@pytest.mark.parametrize("kv", KINDS)
def test_a_gap_is_refused_and_changes_nothing(kv: KVKind, model: Any) -> None:
    decoder = ReferenceDecoder(model, options(kv=kv))
    first = run(decoder, TOKENS[:5])
    with pytest.raises(RequestError, match="has 5 tokens"):
        run(decoder, [1], start=6)
    with pytest.raises(RequestError, match="out of range"):
        run(decoder, [1], start=512)
    np.testing.assert_array_equal(run(decoder, TOKENS[:5]), first)


@pytest.mark.parametrize("kv", KINDS)
def test_a_cache_is_filled_without_a_prompt_of_its_length(kv: KVKind) -> None:
    decoder = ReferenceDecoder(make_model(make_spec(max_context=2100)), options(kv=kv, context=2100))
    fill(decoder, 2000)
    assert decoder.cache.length(0) == 2000
    kind = KINDS[kv]
    assert decoder.cache.paged_length(0) >= 2000 - 2 * kind.page - kind.unpaged
    found = measure_at(decoder, tokens=2000, decode_tokens=4)
    assert (found.tokens, found.decode_tokens) == (2000, 4)
    assert found.kv_bytes == pytest.approx(found.bytes_per_token - decoder.weight_bytes, rel=0.2)
    with pytest.raises(ContextOverflowError, match="2097 tokens in the cache"):
        measure_at(decoder, tokens=2097, decode_tokens=4)
