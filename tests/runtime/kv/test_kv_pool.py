"""Slots that share one pool of pages, and export and import of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.reference.cache import ReferenceCache
from runtime.errors import OutOfMemoryError, RequestError
from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.kv.stores import Arrays
from tests.close import assert_close
from tests.runtime.conftest import make_spec

SLOTS, CONTEXT, ROWS = 3, 700, 128
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


def make(kv: KVKind, spec: Any, *, pages: int | None = None, context: int = CONTEXT) -> ReferenceCache:
    return ReferenceCache(KINDS[kv], spec, context=context, slots=SLOTS, max_rows=ROWS, pages=pages)


def step(cache: ReferenceCache, slot: int, count: int, generator: torch.Generator) -> None:
    start = cache.length(slot)
    positions, slots = torch.arange(start, start + count), torch.full((count,), slot)
    cache.begin(slots.numpy().astype(np.int32), positions.numpy().astype(np.int32))
    for layer in range(SHAPE["num_layers"]):
        k, v = torch.randn(2, count, SHAPE["num_kv_heads"], SHAPE["head_dim"], generator=generator)
        cache.append(layer, slots, positions, k, v)


def fill(cache: ReferenceCache, slot: int, length: int, seed: int = 0) -> None:
    generator, sizes = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    while (left := length - cache.length(slot)) > 0:
        step(cache, slot, min(left, int(sizes.integers(1, ROWS + 1))), generator)


def contents(cache: ReferenceCache, slot: int) -> list[torch.Tensor]:
    return [cache.read(part, layer, slot) for part in PARTS for layer in range(SHAPE["num_layers"])]


@pytest.mark.parametrize("kv", KINDS)
def test_a_pool_of_one_context_serves_whoever_is_alone(kv: KVKind) -> None:
    """`has_room` is never wrong, and clearing the others always makes room for all of the context."""
    kind, spec = KINDS[kv], make_spec(**SHAPE)
    cache = make(kv, spec, pages=kind.max_pages(CONTEXT))
    planned = cache_bytes(kind, spec, context=CONTEXT, slots=SLOTS, max_rows=ROWS, pages=kind.max_pages(CONTEXT))
    assert cache.store.nbytes == planned
    rng, generator, crowded = np.random.default_rng(5), torch.Generator().manual_seed(5), 0
    for _ in range(150):
        slot, other = (int(i) for i in rng.permutation(SLOTS)[:2])
        if rng.random() < 0.3:
            cache.fork(slot, other, int(rng.integers(0, cache.length(slot) + 1)))
            slot = other
        rows = min(int(rng.integers(1, ROWS + 1)), CONTEXT - cache.length(slot))
        for each in range(SLOTS):
            if not cache.has_room(slot, cache.length(slot) + rows) and each != slot:
                crowded += 1
                cache.clear(each)
        assert cache.has_room(slot, CONTEXT) or any(cache.length(each) for each in range(SLOTS) if each != slot)
        if rows:
            step(cache, slot, rows, generator)
        else:
            cache.trim(slot, int(rng.integers(0, CONTEXT)))
    assert crowded > 5


@pytest.mark.parametrize("kv", ["int8", "int4", "kivi2"])
def test_without_room_a_step_is_refused(kv: KVKind) -> None:
    kind = KINDS[kv]
    cache = make(kv, make_spec(**SHAPE), pages=4)
    fill(cache, 0, kind.sinks + 4 * kind.page - 6)
    assert not cache.has_room(1, 700)
    with pytest.raises(OutOfMemoryError, match="all 4 pages"):
        fill(cache, 1, 700)
    cache.clear(0)
    assert cache.has_room(1, cache.length(1) + 1)
    step(cache, 1, 1, torch.Generator())


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("length", [1, 127, 128, 385, 700])
def test_what_left_a_cache_comes_back_as_it_was(kv: KVKind, length: int) -> None:
    spec = make_spec(**SHAPE)
    source, target = make(kv, spec), make(kv, spec)
    fill(source, 1, length)
    fill(target, 0, 200, seed=1)
    fill(target, 2, 300, seed=2)
    beside = contents(target, 0)
    target.load(2, length, source.paged_length(1), source.export(1))
    assert (target.length(2), target.table.count(2)) == (length, source.table.count(1))
    for cache, slot in ((source, 1), (target, 2)):
        cache.trim(slot, length - length // 3)
        fill(cache, slot, length, seed=9)
    for mine, theirs in zip(contents(target, 2), contents(source, 1), strict=True):
        assert_close(mine, theirs, "exact")
    for before, after in zip(beside, contents(target, 0), strict=True):
        assert_close(before, after, "exact")


@pytest.mark.parametrize("kv", ["fp16", "hierarchical"])
def test_pieces_that_do_not_belong_there_leave_the_slot_empty(kv: KVKind) -> None:
    spec = make_spec(**SHAPE)
    source, target = make(kv, spec), make(kv, spec)
    fill(source, 0, 600)
    paged = source.paged_length(0)
    pieces: list[Arrays] = list(source.export(0))
    assert len(pieces) > 1
    bad: list[tuple[int, int, list[Arrays]]] = [
        (600, paged, pieces[:-1]),
        (600, paged, [pieces[-1], *pieces[1:]]),
        (600, paged, [{name: x.view(np.int8) for name, x in piece.items()} for piece in pieces]),
        (600, paged, [pieces[0], *({"keys": piece["keys"]} for piece in pieces[1:])]),
        (0, 0, pieces),
        (CONTEXT + 1, paged, pieces),
        (600, 0, pieces),
        (100, paged, pieces),
    ]
    for length, in_pages, given in bad:
        with pytest.raises(RequestError):
            target.load(2, length, in_pages, given)
        assert (target.length(2), target.table.used) == (0, 0)
    small = make(kv, spec, pages=2)
    with pytest.raises(OutOfMemoryError):
        small.load(0, 600, paged, pieces)
    assert (small.length(0), small.table.used) == (0, 0)
