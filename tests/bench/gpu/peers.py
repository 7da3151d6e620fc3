"""Other programs' products with one row of activations: torch's 4-bit kernel, gemlite's, and half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.bench.gpu.clock import Launch, copies_past_cache
from tests.bench.gpu.matrices import GROUP_SIZE
from tests.bench.gpu.sizes import Sizes

_INNER_K_TILES = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to multiply."""

    launches: Sequence[Launch]
    """One launch for each copy of the weights."""
    nbytes: int
    """Bytes of one copy of the weights."""


def half_precision(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """torch's product in float16."""
    N, K = shape
    dtype = torch.float16
    count = copies_past_cache(2 * N * K, sizes.rotated_bytes)
    weights = [torch.randn(N, K, device=device, dtype=dtype) / K**0.5 for _ in range(count)]
    x, out = torch.randn(rows, K, device=device, dtype=dtype), torch.empty(rows, N, device=device, dtype=dtype)
    return Peer([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights], 2 * N * K)


def torch_int4(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """torch's `_weight_int4pack_mm`: tensor cores, activations in bfloat16, groups of 128."""
    N, K = shape
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_K_TILES)
    scales = torch.full((K // GROUP_SIZE, N, 2), 0.01, dtype=torch.bfloat16, device=device)
    nbytes = packed.nbytes + scales.nbytes
    x = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
    weights = [packed.clone() for _ in range(copies_past_cache(nbytes, sizes.rotated_bytes))]
    multiply = torch.ops.aten._weight_int4pack_mm
    return Peer([lambda w=w: multiply(x, w, GROUP_SIZE, scales) for w in weights], nbytes)


def gemlite_int4(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """gemlite's 4-bit product, activations in float16, groups of 128; it tunes itself when called first."""
    from gemlite import DType, GemLiteLinear

    N, K = shape
    groups = (N * K // GROUP_SIZE, 1)
    scales = torch.full(groups, 0.01, dtype=torch.float16, device=device)
    zeros = torch.full(groups, 8.0, dtype=torch.float16, device=device)

    def layer() -> torch.nn.Module:
        linear = GemLiteLinear(4, GROUP_SIZE, K, N, input_dtype=DType.FP16, output_dtype=DType.FP16)
        linear.pack(torch.randint(0, 16, (N, K), dtype=torch.uint8, device=device), scales, zeros, None)
        return linear

    nbytes = N * K // 2 + scales.nbytes + zeros.nbytes
    x = torch.randn(rows, K, device=device, dtype=torch.float16)
    layers = [layer() for _ in range(copies_past_cache(nbytes, sizes.rotated_bytes))]
    return Peer([lambda one=one: one(x) for one in layers], nbytes)
