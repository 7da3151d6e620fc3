"""Operands of the GPU's kernels, and what is expected of them: matrices, activations, experts, pages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from models.packed import PackedLinear
from models.packing import pack
from runtime.backends.triton.experts import GpuExperts, HostRecords, stack
from runtime.backends.triton.kernels.activations import rotate
from runtime.backends.triton.kernels.cache import LayerPages
from runtime.backends.triton.kernels.experts import Groups, group, most_blocks
from runtime.backends.triton.layout import GpuLinear, parts_of, repack
from runtime.backends.triton.residual import ordinary, page_locked
from runtime.backends.triton.sizes import BLOCK, LANES, PIECE, WORDS
from runtime.kv.kinds import KINDS
from tests.close import Tolerance, assert_close

SUMS = Tolerance(spread=1e-6, why="32 halves summed in float32, in another order")
TURNED = Tolerance(rtol=1e-3, spread=1e-5, why="sums of 64 in another order where rows are fewer, rounded to halves")
EXACT = Tolerance(spread=1e-5, why="codes and activations enter exactly; sums are rounded in another order")
"""Under the interpreter sums are off by up to 1e-6 of the results' root mean square; tensor cores truncate instead of
rounding, and sums are some eight times as large before the offset is taken off again."""


def left_of(M: int, K: int, device: str, *, rotated: bool = False) -> torch.Tensor:
    """Where a kernel leaves what products read of x [M, K]: sums of its pieces, or its rows rotated."""
    pieces = -(-K // PIECE)
    dtype = torch.float16 if rotated else torch.float32
    return poisoned(M, pieces * (PIECE if rotated else 1), dtype=dtype, device=device)


def assert_left(left: torch.Tensor, x: torch.Tensor) -> None:
    """What a kernel left of x float16 [M, K] is what a launch of its own makes of it."""
    if left.dtype == torch.float32:
        padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32))
        assert_close(left, padded.unflatten(1, (-1, 32)).sum(dim=2), SUMS)
        return
    expected = torch.full_like(left, torch.nan)
    rotate(x, expected)
    assert_close(left.float(), expected.float(), TURNED)


def packed_matrix(
    N: int, K: int, bits: int, group_size: int, seed: int = 0, *, bias: bool = False, name: str = "layers.0.down"
) -> PackedLinear:
    """A random matrix of uniform groups, as stored."""
    rng, G = np.random.default_rng(seed), -(-K // group_size)
    return PackedLinear(
        name=name,
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits),
        scales=rng.normal(0, 0.02, (N, G)).astype(np.float16),
        zeros=rng.integers(0, 1 << bits, (N, G), dtype=np.uint8),
        bias=rng.normal(size=N).astype(np.float32) if bias else None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


def dequantize(weight: GpuLinear) -> torch.Tensor:
    """A matrix on the device, read back as its layout's description says: float32 [N, K] on the CPU."""
    (N, K), bits, blocks = weight.shape, weight.bits, -(-weight.shape[1] // BLOCK)
    inside, tail, short = parts_of(weight.codes.cpu(), weight.shape, bits)
    words = torch.zeros(blocks, WORDS[bits], N, LANES, dtype=torch.int32)
    words[: len(inside)], words[len(inside) :, : len(tail)] = inside, tail
    for word in short.int():
        words[-1, len(tail)] = word & 0xFF | (word & 0xFF00) << 8
    halves, each = torch.stack((words, words >> 16), dim=-1), 16 // bits
    pieces = [halves[:, i // each] >> bits * (i % each) & (1 << bits) - 1 for i in range(each * WORDS[bits])]
    if bits == 3:
        pieces.append(sum((halves[:, bit] >> 15 & 1) << bit for bit in range(3)))
    lanes = torch.stack(pieces, dim=1).view(blocks, BLOCK // PIECE, N, 4, 2, 2, 2)
    codes = lanes.permute(2, 0, 1, 4, 3, 5, 6).reshape(N, blocks * BLOCK)[:, :K]
    if weight.codebook is not None:
        return weight.codebook.cpu().float().gather(1, codes.long())
    assert weight.groups is not None
    scales, offsets = weight.groups.cpu().view(torch.float16).unflatten(1, (-1, 2)).float().unbind(2)
    spread = [part.T.repeat_interleave(weight.group_size, 1)[:, :K] for part in (scales, offsets + (1 << bits))]
    return (codes.float() + spread[1]) * spread[0]


def uniform(N: int, K: int, bits: int, group_size: int, device: str, seed: int = 0, *, bias: bool = False) -> GpuLinear:
    return repack(packed_matrix(N, K, bits, group_size, seed, bias=bias), device)


def codebook(N: int, K: int, bits: int, device: str, seed: int = 0) -> GpuLinear:
    """A random matrix with a codebook an output channel, and a bias."""
    rng = np.random.default_rng(seed)
    packed = replace(
        packed_matrix(N, K, bits, K, seed, bias=True),
        codebook=rng.integers(-127, 128, (N, 1 << bits), dtype=np.int8),
        scales=rng.normal(0, 2e-4, (N, 1)).astype(np.float16),
        zeros=None,
    )
    return repack(packed, device)


def activations(M: int, K: int, device: str, seed: int = 0) -> torch.Tensor:
    """Activations float16 [M, K] with a mean and a few outliers, as layers see them."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed)) + 0.25
    x[:, :: max(1, K // 3)] *= 30
    return x.to(torch.float16).to(device)


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN wherever a kernel is to write."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def product(x: torch.Tensor, weight: GpuLinear) -> torch.Tensor:
    """x float16 [M, K] times the dequantized matrix, plus its bias, float64 [M, N]."""
    expected = x.cpu().double() @ dequantize(weight).double().T
    return expected if weight.bias is None else expected + weight.bias.cpu().double()


def experts(
    count: int,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    device: str,
    resident: Collection[int] | None = None,
    *,
    bias: bool = False,
) -> GpuExperts:
    """Matrices of a block's experts, random by their numbers."""
    host = HostRecords(ordinary if device == "cpu" else page_locked)
    stored = [packed_matrix(N, K, bits, group_size, seed, bias=bias) for seed in range(count)]
    return stack(stored, torch.device(device), repack, resident=resident, host=host)


def choice(M: int, each: int, count: int, device: str) -> torch.Tensor:
    """Experts of rows, int32 [M, each], ascending."""
    generator = torch.Generator().manual_seed(M)
    rows = [torch.randperm(count, generator=generator)[:each].sort().values for _ in range(M)]
    return torch.stack(rows).to(torch.int32).to(device)


def grouped(chosen: torch.Tensor, count: int, block_m: int) -> Groups:
    """The pairs of rows and their experts, int32 [M, each], in blocks of one expert."""
    pairs = chosen.numel()
    shapes = ((pairs,), (3, most_blocks(pairs, count, block_m)))
    groups = Groups(*(torch.full(shape, -1, dtype=torch.int32, device=chosen.device) for shape in shapes))
    group(chosen, count, groups, block_m)
    return groups


class HalfPages:
    """A half-precision cache [2, slots, H_kv, T, D] of one layer cut into pages that lie in any order."""

    def __init__(self, cache: torch.Tensor, device: str) -> None:
        _, slots, H_kv, T, D = cache.shape
        page = KINDS["fp16"].page
        each = -(-T // page)
        padded = torch.full((2, slots, H_kv, each * page, D), torch.nan, dtype=torch.float16)
        padded[..., :T, :] = cache
        self.shape, self.order = cache.shape, torch.randperm(slots * each, generator=torch.Generator().manual_seed(1))
        cut = padded.view(2, slots, H_kv, each, page, D).transpose(2, 3).reshape(2, slots * each, H_kv, page * D)
        pools = torch.empty(cut.shape, dtype=torch.float16)
        pools[:, self.order] = cut
        keys, values = pools.to(device).view(torch.uint8)
        tables = self.order.to(torch.int32).view(slots, each).to(device)
        self.pages = pages_of({"keys": keys, "values": values}, tables, H_kv, D)

    def read(self) -> torch.Tensor:
        """The cache as it is now, on the CPU: float16 [2, slots, H_kv, T, D]."""
        _, slots, H_kv, T, D = self.shape
        pools = torch.stack([self.pages.pools[part].cpu().view(torch.float16) for part in ("keys", "values")])
        cut = pools[:, self.order].view(2, slots, -1, H_kv, self.pages.kind.page, D).transpose(2, 3)
        return cut.reshape(2, slots, H_kv, -1, D)[..., :T, :]


def pages_of(pools: dict[str, torch.Tensor], tables: torch.Tensor, H_kv: int, D: int) -> LayerPages:
    """Pages of a half-precision cache of one layer, which has no windows."""
    slots, device = len(tables), tables.device
    nothing = torch.zeros(slots, H_kv, 0, D, dtype=torch.float16, device=device)
    return LayerPages(
        kind=KINDS["fp16"],
        head_dim=D,
        kv_heads=H_kv,
        layers=1,
        pools=pools,  # type: ignore[arg-type]
        windows={"keys": nothing, "values": nothing},
        tables=tables,
        paged=torch.zeros(slots, dtype=torch.int32, device=device),
    )
