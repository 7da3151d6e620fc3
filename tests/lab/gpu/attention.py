"""Attention of one decoded token over a long cache: microseconds and GB/s of each kind, beside torch in half precision.

The shape is that of QuantSpec's Table 5: a model of 32 heads of 128 channels, here with as many key-value heads as the
measured model has. Caches are rotated past the second-level cache.

Every number of a page is the same, so that what attention must give is known, and is checked.

Source: QuantSpec Table 5.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.backends.triton.kernels.attention import attend
from runtime.backends.triton.kernels.cache import LayerPages, Rows
from runtime.backends.triton.workspace import Workspace
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind, record_bytes
from tests.lab.gpu.bandwidth import read_gb_s
from tests.lab.gpu.clock import copies_past_cache, race
from tests.lab.gpu.layers import Peer
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes

CONTESTANTS: tuple[KVKind, ...] = ("fp16", "int8", "int4", "hierarchical", "kivi2", "gear4", "gear2")
"""Kinds that are timed; the hierarchical one as a draft reads it, too."""
FILL = 0x21
"""Every byte of a page: 0x2121 is a half of 0.01, a code of 33, or 1 and 2, and an index far behind every page."""
FLASH = "torch float16 flash"
"""What the others are compared with."""
TARGETS: Mapping[KVKind, float] = {"int4": 2.9, "int8": 1.5}
"""Times as fast as that, at 64k and 256k tokens (QuantSpec Table 5)."""
TARGET_CONTEXT = 65536
"""The shortest context that they hold for."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each length and kind of cache, all of a length in one race."""
    limit = read_gb_s(sizes, device)
    part.add({"what": "read", "gb_s": limit})
    for kind in TARGETS:
        part.add(_check(KINDS[kind], sizes.attention_contexts[0], sizes, device))
    for context in sizes.attention_contexts:
        if not part.begin({"context": context}):
            continue
        contestants = {name: _ours(KINDS[name], context, sizes, device) for name in CONTESTANTS}
        contestants["hierarchical draft"] = _ours(KINDS["hierarchical"], context, sizes, device, draft=True)
        contestants[FLASH] = _torch(context, sizes, device, flash=True)
        contestants["torch float16"] = _torch(context, sizes, device, flash=False)
        _compare(part, context, contestants, sizes, device, limit)


def _compare(
    part: Part, context: int, contestants: Mapping[str, Peer], sizes: Sizes, device: torch.device, limit: float
) -> None:
    """One race."""
    launches = {name: peer.launches for name, peer in contestants.items()}
    times = race(launches, device, rounds=max(1, sizes.rounds // 2))
    for name, time in times.items():
        gb_s = contestants[name].nbytes / time.p50 / 1e9
        row = {"what": name, "context": context, **time.microseconds(), "cache_bytes": contestants[name].nbytes}
        row |= {"gb_s": round(gb_s, 1), "percent_of_reads": round(100 * gb_s / limit, 1) if limit else None}
        if FLASH in times:
            row["times_as_fast_as_torch"] = round(times[FLASH].p50 / time.p50, 2)
        if name in TARGETS and FLASH in times and context >= TARGET_CONTEXT:
            row |= {"target": TARGETS[name], "met": times[FLASH].p50 / time.p50 >= TARGETS[name]}
        part.add(row)


def _check(kind: CacheKind, context: int, sizes: Sizes, device: torch.device) -> Row:
    """Whether the output is the one number, or the two in turns, that all values read back as."""
    spec = sizes.spec
    paged = (context - kind.unpaged) // kind.page
    layer = _layer(kind, paged, spec.num_kv_heads, spec.head_dim, device)
    scale = float(torch.tensor([FILL] * 2, dtype=torch.uint8).view(torch.float16))
    codes = [FILL] if kind.keys.bits == 8 else [FILL & 15, FILL >> 4]
    wanted = torch.tensor([code * scale + scale for code in codes]).repeat(spec.q_width // len(codes))
    layer.windows["values"].copy_(wanted[: spec.head_dim].half())
    q = torch.randn(1, spec.q_width, device=device).half()
    x = torch.full_like(q, torch.nan)
    slot, last = torch.zeros(1, dtype=torch.int32, device=device), paged * kind.page + kind.unpaged - 1
    attend(q, layer, Rows(slot + last, slot), None, x, Workspace(device), context=context)
    off = float((x[0].float().cpu() / wanted - 1).abs().max())
    return {"what": f"check of {kind.name}", "context": context, "largest_error": round(off, 5), "correct": off < 2e-3}


def _ours(kind: CacheKind, context: int, sizes: Sizes, device: torch.device, *, draft: bool = False) -> Peer:
    """This program's kernel over codes of one value, and a window as it is after a flush."""
    spec = sizes.spec
    H, H_kv, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    paged = (context - kind.unpaged) // kind.page
    nbytes = sum(paged * H_kv * record_bytes(kind, part, D) for part in PARTS) + 4 * kind.unpaged * H_kv * D
    count = copies_past_cache(nbytes, sizes.rotated_bytes)
    layers = [_layer(kind, paged, H_kv, D, device) for _ in range(count)]
    q, x = torch.randn(1, H * D, device=device).half(), torch.empty(1, H * D, dtype=torch.float16, device=device)
    position = torch.tensor([paged * kind.page + kind.unpaged - 1], dtype=torch.int32, device=device)
    slot, workspace = torch.zeros(1, dtype=torch.int32, device=device), Workspace(device)

    def launch(pages: LayerPages) -> None:
        attend(q, pages, Rows(position, slot), None, x, workspace, context=context, draft=draft)

    read = nbytes
    if draft:
        read -= sum(paged * H_kv * kind.page * D // 2 for _ in PARTS)
    return Peer([lambda one=one: launch(one) for one in layers], read)


def _layer(kind: CacheKind, paged: int, H_kv: int, D: int, device: torch.device) -> LayerPages:
    """One slot's cache of one layer."""
    pools, windows = {}, {}
    for part in PARTS:
        pools[part] = torch.full((paged, H_kv, record_bytes(kind, part, D)), FILL, dtype=torch.uint8, device=device)
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


def _torch(context: int, sizes: Sizes, device: torch.device, *, flash: bool) -> Peer:
    """torch's attention in half precision, of one query: its flash attention, or whatever it takes."""
    spec = sizes.spec
    H, H_kv, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    nbytes = 4 * context * H_kv * D
    caches = [
        torch.randn(2, 1, H_kv, context, D, device=device).half()
        for _ in range(copies_past_cache(nbytes, sizes.rotated_bytes))
    ]
    q = torch.randn(1, H, 1, D, device=device).half()
    backends = [SDPBackend.FLASH_ATTENTION]
    if not flash or device.type != "cuda":
        backends += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def run(kv: torch.Tensor) -> None:
        with sdpa_kernel(backends):
            torch.nn.functional.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=H_kv != H)

    return Peer([lambda kv=kv: run(kv) for kv in caches], nbytes)
