"""Bytes of a cache in percent of half precision: from real buffers, and as the papers count them."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.spec import ModelSpec, RopeSpec
from runtime.backends.decoder import DecoderOptions
from runtime.backends.reference.cache import ReferenceCache
from runtime.kv.control import PagedCache
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind, window_token_bytes
from tests.bench.caches.extent import ORDER
from tests.bench.caches.laboratory import Notebook
from tests.bench.reporting.results import digest

HEAD_DIMS = (64, 128)
LENGTHS = (1024, 32768)
LAYERS, KV_HEADS = 1, 2
_ROWS = 128


def measure(notebook: Notebook) -> None:
    """Measure what is missing."""
    code = digest([notebook.codes.storing, notebook.codes.cpu])
    for D in HEAD_DIMS:
        for name in ORDER:
            what = f"bytes of {name} with {D} channels"
            notebook.attempt(
                what,
                lambda d=D, n=name: notebook.known("size", [n, d, LENGTHS], code, lambda: _sizes(n, d)),  # type: ignore[misc]
            )


def accounted(kind: CacheKind, head_dim: int) -> float:
    """Percent of half precision of a page as GEAR counts: codes, scales and zeros, factors, outliers with places.

    Source: GEAR §4, "KV size"; QServe §4.3 and QuantSpec §4.2 for the kinds that are theirs.
    """
    bits = 0.0
    for part in PARTS:
        code, T = kind.code(part), kind.page
        length = head_dim if code.axis == "token" else T
        bits += code.bits
        if code.bits < 16:
            bits += 32 / min(code.group or length, length)
        if kind.rank:
            bits += 16 * kind.rank * (T + head_dim) / (T * head_dim)
        bits += 32 * 2 * kind.outliers(length) / length
    return 100 * bits / 2 / 16


def _spec(head_dim: int) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden_size=head_dim * KV_HEADS,
        intermediate_size=64,
        num_layers=LAYERS,
        num_heads=KV_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        vocab_size=64,
        max_context=2 * max(LENGTHS),
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=head_dim),
        windows=(None,) * LAYERS,
    )


def _sizes(name: KVKind, head_dim: int) -> dict[str, Any]:
    """Percent by backend: of a page, and of what so many tokens hold, windows included; and of all buffers."""
    kind, spec = KINDS[name], _spec(head_dim)
    token = 4 * LAYERS * KV_HEADS * head_dim
    found: dict[str, Any] = {"kind": name, "head_dim": head_dim, "accounted": round(accounted(kind, head_dim), 2)}
    for backend in ("reference", "cpu"):
        for length in LENGTHS:
            cache, page, buffers = _cache(backend, kind, spec, length)
            _fill(cache, length)
            found[f"{backend} page"] = round(100 * page / (kind.page * token), 2)
            used = cache.table.used * page + cache.window_length(0) * window_token_bytes(kind, spec)
            found[f"{backend} {length}"] = round(100 * used / (length * token), 2)
            found[f"{backend} {length} buffers"] = round(100 * buffers / (length * token), 2)
    return found


def _cache(backend: str, kind: CacheKind, spec: ModelSpec, length: int) -> tuple[PagedCache, int, int]:
    """An empty cache, bytes of one of its pages, and bytes of its buffers."""
    if backend == "reference":
        one = ReferenceCache(kind, spec, context=length, slots=1, max_rows=_ROWS)
        return one, sum(pool[0].nbytes for pool in one.store.pools.values()), one.store.nbytes
    from runtime.backends.cpu.cache import CpuCache

    other = CpuCache(spec, DecoderOptions(kv=kind.name, context=length, slots=1, max_rows=_ROWS), 1)
    return other, other.store.page_bytes, other.store.nbytes


def _fill(cache: PagedCache, length: int) -> None:
    """Let slot 0 hold so many tokens of zeros, as steps of a page would."""
    for _, store in cache._parts:
        store.flush = lambda slot, page, rest: None  # type: ignore[method-assign]  # zeros need no arithmetic
    for start in range(0, length, _ROWS):
        rows = np.arange(start, min(start + _ROWS, length), dtype=np.int32)
        cache.begin(np.zeros_like(rows), rows)
