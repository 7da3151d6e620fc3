"""Attention of one decoded token over a long cache: microseconds and GB/s of each kind, beside torch in half precision.

The shape is that of QuantSpec's Table 5: a model of 32 heads of 128 channels, here with as many key-value heads as the
measured model has. Caches are rotated past the second-level cache.

Source: QuantSpec Table 5.
"""

from __future__ import annotations

import torch

from runtime.kernels.attention.triton import attend
from runtime.kernels.cache.pages import LayerPages, record_bytes
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind
from runtime.triton.workspace import Workspace
from tests.bench.gpu.clock import copies_past_cache, race
from tests.bench.gpu.peers import Peer
from tests.bench.gpu.report import Part
from tests.bench.gpu.sizes import Sizes

CONTESTANTS: tuple[KVKind, ...] = ("fp16", "int8", "int4", "hierarchical", "kivi2", "gear4", "gear2")
"""Kinds that are timed; the hierarchical one as a draft reads it, too."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each length and kind of cache, all of a length in one race."""
    for context in sizes.attention_contexts:
        if part.late():
            part.add({"what": "left out for want of time", "context": context})
            continue
        contestants = {name: _ours(KINDS[name], context, sizes, device) for name in CONTESTANTS}
        contestants["hierarchical draft"] = _ours(KINDS["hierarchical"], context, sizes, device, draft=True)
        contestants["torch float16"] = _torch(context, sizes, device)
        launches = {name: peer.launches for name, peer in contestants.items()}
        times = race(launches, device, rounds=max(1, sizes.rounds // 2))
        for name, time in times.items():
            row = {"what": name, "context": context, **time.microseconds(), "cache_bytes": contestants[name].nbytes}
            row["gb_s"] = round(contestants[name].nbytes / time.p50 / 1e9, 1)
            part.add(row | {"times_as_fast_as_torch": round(times["torch float16"].p50 / time.p50, 2)})


def _ours(kind: CacheKind, context: int, sizes: Sizes, device: torch.device, *, draft: bool = False) -> Peer:
    """This program's kernel over random codes with scales of 0.01, and a window as it is after a flush."""
    spec = sizes.spec
    H, H_kv, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    paged = (context - kind.keep) // kind.page
    nbytes = sum(paged * H_kv * record_bytes(kind, part, D) for part in PARTS) + 4 * kind.keep * H_kv * D
    count = copies_past_cache(nbytes, sizes.rotated_bytes)
    layers = [_layer(kind, paged, H_kv, D, device) for _ in range(count)]
    q, x = torch.randn(1, H * D, device=device).half(), torch.empty(1, H * D, dtype=torch.float16, device=device)
    position = torch.tensor([paged * kind.page + kind.keep - 1], dtype=torch.int32, device=device)
    slot, workspace = torch.zeros(1, dtype=torch.int32, device=device), Workspace(device)

    def launch(pages: LayerPages) -> None:
        attend(q, pages, position, slot, None, x, workspace, context=context, draft=draft)

    read = nbytes
    if draft:
        read -= sum(paged * H_kv * kind.page * D // 2 for _ in PARTS)
    return Peer([lambda one=one: launch(one) for one in layers], read)


def _layer(kind: CacheKind, paged: int, H_kv: int, D: int, device: torch.device) -> LayerPages:
    """One slot's cache of one layer."""
    pools, windows = {}, {}
    for part in PARTS:
        pool = torch.full((paged, H_kv, record_bytes(kind, part, D)), 0x21, dtype=torch.uint8, device=device)
        pools[part] = pool  # 0x2121 is a half of 0.01; a code of 1 or 2, and an index far behind every page
        windows[part] = torch.randn(1, H_kv, kind.window_capacity(1), D, device=device).half()
    return LayerPages(
        kind=kind,
        head_dim=D,
        kv_heads=H_kv,
        layers=1,
        pools=pools,
        windows=windows,
        tables=torch.randperm(paged, device=device).to(torch.int32)[None],
        paged=torch.tensor([paged * kind.page], dtype=torch.int32, device=device),
    )


def _torch(context: int, sizes: Sizes, device: torch.device) -> Peer:
    """torch's attention in half precision, of one query."""
    spec = sizes.spec
    H, H_kv, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    nbytes = 4 * context * H_kv * D
    caches = [
        torch.randn(2, 1, H_kv, context, D, device=device).half()
        for _ in range(copies_past_cache(nbytes, sizes.rotated_bytes))
    ]
    q = torch.randn(1, H, 1, D, device=device).half()
    run = torch.nn.functional.scaled_dot_product_attention
    return Peer([lambda kv=kv: run(q, kv[0], kv[1], enable_gqa=H_kv != H) for kv in caches], nbytes)
