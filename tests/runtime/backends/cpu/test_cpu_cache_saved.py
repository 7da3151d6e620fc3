"""Export and import of sequences in the CPU backend's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.cache import CpuCache
from runtime.backends.decoder import DecoderOptions
from runtime.engine import saved
from runtime.kv.kinds import KINDS, PARTS, KVKind
from tests.runtime.conftest import make_spec


def make(spec: Any, kv: KVKind, seed: int) -> CpuCache:
    """A cache full of noise; slots 0 and 1 have tokens."""
    cache = CpuCache(spec, DecoderOptions(kv=kv, context=700, slots=3, max_rows=128), 1)
    rng = np.random.default_rng(seed)
    for array in (cache.store.records, cache.store._keys, cache.store._values):
        array.view(np.uint8)[:] = rng.integers(0, 255, array.view(np.uint8).shape)
    for length, slot in ((100, 0), (500, 1)):
        for start in range(0, length, 100):
            positions = np.arange(start, start + 100, dtype=np.int32)
            cache.begin(np.full(100, slot, np.int32), positions)
    return cache


def contents(cache: CpuCache, slot: int) -> dict[str, Any]:
    pages, window = cache.table.held(slot), cache.window_length(slot)
    found = {part: cache.store.window(part, slot, window if cache.kind.windowed else 0) for part in PARTS}
    return {**found, "records": cache.store.records[:, pages]}


@pytest.mark.parametrize("kv", KINDS)
def test_a_file_comes_back_bit_for_bit(kv: KVKind, tmp_path: Path) -> None:
    spec = make_spec(head_dim=20)
    source, target = make(spec, kv, 0), make(spec, kv, 1)
    beside = {slot: contents(target, slot) for slot in (0, 1)}
    about = saved.About.of(source, spec, model="id", recipe={})
    assert about.layout == f"cpu-3-{source.store.layout.name}"
    tokens = list(range(500))
    saved.write(tmp_path / "chat.kv", about, tokens, source, 1)
    assert saved.load(tmp_path / "chat.kv", about, target, 2) == tokens
    assert (target.length(2), target.paged_length(2)) == (500, source.paged_length(1))
    for cache, slot, expected in ((target, 2, contents(source, 1)), *((target, slot, beside[slot]) for slot in (0, 1))):
        for name, array in contents(cache, slot).items():
            assert array.tobytes() == expected[name].tobytes(), (slot, name)
