"""The CPU backend's cache against the reference's: its contents, and attention over it."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.backends.cpu.cache import CpuCache
from runtime.backends.decoder import DecoderOptions
from runtime.kv.kinds import KINDS, KVKind
from tests.close import assert_close
from tests.grid import QUICK_CACHES, grid
from tests.runtime.backends.cpu.attention import Attention, distance
from tests.runtime.conftest import make_spec

# What integer queries and weights may add to the error of the output, as a share of the output's own size (root mean
# square): one plane of INT8 where codes have 4 bits or fewer, two planes where they have 8.
TOLERANCE = {"fp16": 5e-6, "int8": 6e-4, "hierarchical": 3e-4}
ONE_PLANE = 5e-2


EVERY: list[KVKind] = list(KINDS)


def test_slots_share_as_many_pages_as_the_options_say() -> None:
    options = DecoderOptions(kv="int8", context=200, slots=3, max_rows=8, pages=5)
    cache = CpuCache(make_spec(), options, threads=1)
    assert cache.table.capacity == cache.store.records.shape[1] == 5


@pytest.mark.parametrize("kind", grid(EVERY, QUICK_CACHES))
def test_steps_of_every_size(kind: KVKind) -> None:
    attention = Attention(kind, splits=2)
    worst, length = 0.0, 0
    for rows in (1, 7, 16, 16, 16, 1, 1, 16, 3, *[16] * 26, 1, 4):
        worst = max(worst, distance(*attention.step([0] * rows, list(range(length, length + rows)))))
        length += rows
    attention.check_stored()
    assert worst < TOLERANCE.get(kind, ONE_PLANE)


def test_a_short_conversation_touches_little_memory() -> None:
    """All layers of a page, and of a slot's window, lie in one stretch: systems give out memory in huge pages."""
    store = Attention("int4").cpu.store
    for array in (store.records, store._keys, store._values):
        layers, places = array.shape[:2]
        assert min(layers, places) > 1
        assert np.ptp(np.array(np.lib.array_utils.byte_bounds(array[:, 1]))) == array.nbytes // places


@pytest.mark.parametrize("kind", grid(EVERY, QUICK_CACHES))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(3, 3, 32, None), (2, 1, 20, 70), (8, 1, 128, None), (10, 2, 80, 200), (6, 1, 96, 5)],
    ids=["D32", "D20-window70", "D128-8heads", "D80-window200", "D96-window5"],
)
def test_shapes_and_sliding_windows(kind: KVKind, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    attention = Attention(kind, heads=heads, kv_heads=kv_heads, dim=dim, window=window, splits=3)
    attention.channel_scale[dim // 2] = 12
    for start in range(0, 320, 16):
        attention.step([1] * 16, list(range(start, start + 16)))
    worst = max(distance(*attention.step([1], [320 + i])) for i in range(3))
    attention.check_stored()
    assert worst < TOLERANCE.get(kind, 1.5 * ONE_PLANE)


@pytest.mark.parametrize("kind", grid(EVERY, QUICK_CACHES))
def test_slots_of_different_length_are_cut_back_and_forked(kind: KVKind) -> None:
    attention = Attention(kind)
    for start in range(0, 288, 8):  # The slots take turns, so their pages are mixed.
        rows = list(range(start, start + 8))
        attention.step([0] * 8, rows)
        attention.step([1] * 8, rows)
    for start, other in ((283, 280), (200, 279), (250, 100)):
        for cache in (attention.cpu, attention.reference):
            for slot, length in ((0, start), (1, other)):
                if length < cache.length(slot):
                    cache.trim(slot, length)
        lengths = [attention.cpu.length(slot) for slot in range(2)]
        positions = [*range(lengths[0], lengths[0] + 5), *range(lengths[1], lengths[1] + 3)]
        assert distance(*attention.step([0] * 5 + [1] * 3, positions)) < TOLERANCE.get(kind, ONE_PLANE)
        if start != 250:
            more = list(range(lengths[0] + 5, lengths[0] + 60))
            for at in range(0, len(more), 11):
                attention.step([0] * 11, more[at : at + 11])
        attention.check_stored()
    for cache in (attention.cpu, attention.reference):
        cache.fork(0, 1, 150)
    assert distance(*attention.step([1], [150])) < TOLERANCE.get(kind, ONE_PLANE)
    attention.check_stored()


def test_a_draft_reads_the_upper_plane_alone() -> None:
    attention = Attention("hierarchical")
    for start in range(0, 400, 16):
        attention.step([0] * 16, list(range(start, start + 16)))
    attention.draft = True
    actual, expected = attention.step([0] * 4, list(range(400, 404)))
    assert distance(actual, expected) < ONE_PLANE
    assert attention.cpu.table.count(0) == 2


@pytest.mark.slow
def test_a_head_of_equal_numbers_and_of_zeros() -> None:
    for kind in EVERY:
        attention = Attention(kind)
        for value in (0.0, -3.0):
            x = np.full((16, 8, 64), value, np.float32)
            for start in range(0, 288, 16):
                actual, expected = attention.step([0] * 16, list(range(start, start + 16)), x)
                assert_close(actual, expected, "half attention")
        attention.check_stored()
