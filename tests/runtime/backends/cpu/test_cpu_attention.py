"""Attention over packed pages in hard cases: long contexts, outliers, odd shapes, scattered pages, real models.

Bounds are shares of the output's root mean square. What is compared is what the reference makes of the same stored
numbers, so they bound what integer queries and weights add to the error of the stored numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.pages import unpack_codes
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.text.tokenizer import Tokenizer
from tests.close import Tolerance, assert_close
from tests.grid import QUICK_CACHES, grid
from tests.runtime.backends.cpu.attention import Attention, distance
from tests.runtime.real import opened

BOUNDS: dict[KVKind, float] = {"fp16": 5e-6, "int8": 6e-4, "hierarchical": 3e-4}
ONE_PLANE = 5e-2
PACKED: list[KVKind] = [kind for kind in KINDS if kind != "fp16"]
Distance = Callable[..., float]
Array = npt.NDArray[np.float32]


@pytest.mark.parametrize("kind", grid(PACKED, {"int4", "hierarchical"}))
def test_any_number_of_heads_and_rows(kind: KVKind) -> None:
    """One to eight query heads share a key-value head, over channels that fill no vector."""
    for heads in range(1, 9):
        attention = Attention(kind, heads=heads, kv_heads=1, dim=(40, 18)[heads % 2], max_rows=64)
        for _ in range(5):
            attention.append(0, attention.rng.standard_normal((64, heads + 2, attention.dim)).astype(np.float32))
        length, worst = 320, 0.0
        for rows in (1, heads):
            worst = max(worst, distance(*attention.step([0] * rows, list(range(length, length + rows)))))
            length += rows
        assert worst < BOUNDS.get(kind, 1.3 * ONE_PLANE), heads


@pytest.mark.parametrize("kind", grid(PACKED, QUICK_CACHES & set(PACKED)))
def test_rows_of_a_step_get_what_they_get_alone(kind: KVKind) -> None:
    """A check of five drafted tokens gives what five steps give."""
    x = np.random.default_rng(3).standard_normal((5, 12, 64)).astype(np.float32)
    outputs = []
    for together in (True, False):
        attention = Attention(kind, heads=8, window=290)
        for start in range(0, 384, 16):
            attention.append(0, np.random.default_rng(start).standard_normal((16, 12, 64)).astype(np.float32))
        if together:
            outputs.append(attention.step([0] * 5, list(range(384, 389)), x)[0])
        else:
            outputs.append(np.concatenate([attention.step([0], [384 + i], x[i : i + 1])[0] for i in range(5)]))
    assert_close(*outputs, Tolerance(atol=2e-6, why="a few roundings of outputs below 1"))


def rounded_as_there(attention: Any, slot: int, x: Array) -> Array:
    """Attention of one row where queries and weights are rounded as the CPU's integer products want them.

    For kinds whose keys have scales by channel: a query times its page's scales is rounded to nearest, a page's weights
    times the values' scales with the fixed dither. What both lose meets codes less their middle.
    """
    cpu, reference, D = attention.cpu, attention.reference, attention.dim
    kind, pages, dither = cpu.kind, reference.table.held(slot), torch.from_numpy(np.array(cpu._dither))
    stored = {part: reference.store.stored(part, 1, pages) for part in PARTS}
    codes = {part: unpack_codes(stored[part]["codes"], kind.code(part).bits, D) for part in PARTS}
    lost = {part: codes[part] - (2 ** kind.code(part).bits - 1) / 2 for part in PARTS}
    keys, values = (reference.read(part, 1, slot) for part in PARTS)
    out = np.empty((1, attention.heads, D), np.float32)
    for head in range(attention.heads):
        of = head // (attention.heads // attention.kv_heads)
        q = torch.from_numpy(x[0, head]) * D**-0.5
        scores = keys[:, of] @ q
        for page in range(len(pages)):
            scales = stored["keys"]["scales"][page, of, :, :, 0].float()  # [D, groups]
            for group, tokens in enumerate(lost["keys"][page, of].chunk(scales.shape[1])):
                scaled = q * scales[:, group]
                step = scaled.abs().max() / 127
                at = kind.sinks + page * kind.page + group * len(tokens)
                scores[at : at + len(tokens)] += tokens @ ((scaled / step).round() * step - scaled)
        weights = torch.softmax(scores, 0)
        total = weights @ values[:, of]
        for page in range(len(pages)):
            at = kind.sinks + page * kind.page
            scaled = weights[at : at + kind.page] * stored["values"]["scales"][page, of, :, 0, 0].float()
            step = scaled.max() / 127
            total += ((scaled / step + dither).floor().clamp(max=127) * step - scaled) @ lost["values"][page, of]
        out[0, head] = total.numpy()
    return out


@pytest.mark.parametrize("kind", grid(PACKED, QUICK_CACHES & set(PACKED)))
def test_channels_far_off_and_single_outliers(kind: KVKind) -> None:
    """A key channel of 30 times the others' size and off zero, a large value channel, and a spike in every token."""
    attention = Attention(kind, heads=8, kv_heads=2, dim=64, splits=2)
    rng = np.random.default_rng(7)

    def rows(count: int) -> Array:
        x = rng.standard_normal((count, 12, 64)).astype(np.float32)
        x[:, :8] *= 0.3
        x[:, 8:10, 17] = 30 + 3 * x[:, 8:10, 17]
        x[:, 10:, 40] *= 12
        x[np.arange(count), 10, rng.integers(0, 64, count)] += 20
        x[np.arange(count), 8, rng.integers(0, 64, count)] += 8
        return x

    for _ in range(26):
        attention.append(1, rows(16))
    worst, unexplained = 0.0, 0.0
    for i in range(3):
        x = rows(1)
        actual, expected = attention.step([1], [416 + i], x)
        worst = max(worst, distance(actual, expected))
        if KINDS[kind].keys.axis == "channel" and not KINDS[kind].hierarchical:
            unexplained = max(unexplained, distance(actual, rounded_as_there(attention, 1, x)))
    # Two bits a channel keep no outliers aside, so a token's scale is that of its large channel or spike. What rounding
    # its weight to INT8 loses is in proportion, and meets channels that average out to little: 2.4 % with kivi2.
    bounds = {"int8": 4e-4, "hierarchical": 4e-4, "kivi2": 3e-2, "gear-l2": 3e-2}
    assert worst < bounds.get(kind, 2e-2)
    assert unexplained < 1e-3


@pytest.mark.parametrize("kind", grid(["int8", "int4", "hierarchical", "kivi2"], {"int4"}))
def test_sixty_four_thousand_tokens(kind: KVKind) -> None:
    """Thousands of weights of much less than a step of INT8 each, and one token that has half of all."""
    attention = Attention(kind, heads=2, kv_heads=1, dim=32, context=1 << 16, slots=1, max_rows=2048, splits=4)
    rng = np.random.default_rng(5)
    for start in range(0, (1 << 16) - 2048, 2048):
        x = rng.standard_normal((2048, 4, 32)).astype(np.float32)
        x[:, 3] += 0.5  # A mean that does not average out
        if start == 1 << 15:
            x[77, 2] = 2.0
        attention.append(0, x)
    x = rng.standard_normal((3, 4, 32)).astype(np.float32)
    x[1, :2] = 1.0
    length = attention.cpu.length(0)
    actual, expected = attention.step([0] * 3, list(range(length, length + 3)), x)
    assert distance(actual, expected) < {"int8": 1e-3, "hierarchical": 1e-3}.get(kind, 2e-2)


@pytest.mark.parametrize("kind", grid(PACKED, QUICK_CACHES & set(PACKED)))
def test_pages_may_lie_anywhere(kind: KVKind) -> None:
    """The same numbers in pages of any order give the same output."""
    attention = Attention(kind, splits=2)
    for start in range(0, 1000, 16):
        attention.append(0, np.random.default_rng(start).standard_normal((16, 8, 64)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((1, 8, 64)).astype(np.float32)
    slots, positions = np.zeros(1, np.int32), np.full(1, attention.cpu.length(0), np.int32)
    attention.cpu.begin(slots, positions)
    before = attention.compiled(x, slots, positions, 1)
    store, tables = attention.cpu.store, attention.cpu.table.tables
    order = np.random.default_rng(2).permutation(store.records.shape[1]).astype(np.int32)
    moved = np.empty_like(store.records)
    moved[:, order] = store.records
    store.records[:] = moved
    tables[tables >= 0] = order[tables[tables >= 0]]
    np.testing.assert_array_equal(attention.compiled(x, slots, positions, 1), before)


@dataclass(frozen=True)
class Recorded:
    """What attention of a model met with a text, by layers."""

    heads: int
    kv_heads: int
    layers: list[Array]
    """Queries, keys and values: float32 [tokens, H + 2 H_kv, D]."""


@pytest.fixture(scope="module", params=["demo", "babyllama105"])
def recorded(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The bundled model has heads of 64 channels, the other of 16."""
    model, words = opened(request.param, shared_data, tmp_path_factory)
    count = min(400, model.spec.max_context)
    tokens = np.array(Tokenizer(model.tokenizer_path).encode(words)[:count], np.int32)
    decoder = ReferenceDecoder(model, DecoderOptions(context=count, max_rows=count))
    queries: list[torch.Tensor] = []
    attend = decoder.cache.attend

    def recording(layer: int, q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        queries.append(q.clone())
        return attend(layer, q, *arguments, **options)

    decoder.cache.attend = recording  # type: ignore[method-assign]
    rows = np.arange(count, dtype=np.int32)
    decoder.forward(Step(tokens=tokens, slots=np.zeros_like(rows), positions=rows, logit_rows=rows[:1]))
    layers = [
        torch.cat([q, *(decoder.cache.read(part, layer, 0) for part in PARTS)], dim=1).numpy()
        for layer, q in enumerate(queries)
    ]
    return Recorded(heads=model.spec.num_heads, kv_heads=model.spec.num_kv_heads, layers=layers)


@pytest.mark.data
@pytest.mark.parametrize("kind", grid(PACKED, QUICK_CACHES & set(PACKED)))
def test_real_queries_keys_and_values(recorded: Recorded, kind: KVKind) -> None:
    for x in (recorded.layers[0], recorded.layers[-1]):
        sizes = {"heads": recorded.heads, "kv_heads": recorded.kv_heads, "dim": x.shape[2]}
        attention = Attention(kind, **sizes, max_rows=64)
        length = len(x) - 64
        for start in range(0, length, 64):
            attention.append(0, x[start : min(start + 64, length)])
        actual, expected = attention.step([0] * 64, list(range(length, len(x))), x[length:])
        assert distance(actual, expected) < BOUNDS.get(kind, ONE_PLANE)
