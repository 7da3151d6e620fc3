"""Compensation of all rows of a prompt with a shared set of residual rows, on tensor cores.

The channels are known before the prompt, so a layer's residuals are copied to the device one layer ahead (`Staging`):
by `stage`, whose few programs read page-locked memory during the previous layer's product, or by the copy engine if all
channels are wanted. Two buffers alternate: while a layer is computed from one, the next layer's residuals arrive in the
other. So the link is always busy, and only costs time by which it exceeds the products.

`multiply` then adds sum over i of x[m, c_i] * R̂[c_i, n], in half precision with float32 sums: codes of 2 to 8 bits are
exact in halves, and an output channel's scale is applied to its sum. `multiply_experts` does the same for a prompt's
pairs (a row and one of its experts), grouped by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.compensate import (
    COPY_DEPTH,
    COPY_PROGRAMS,
    COPY_WARPS,
    COPY_WORDS,
    unpack_residuals,
)
from runtime.backends.triton.kernels.experts import Groups
from runtime.backends.triton.kernels.select import Selection
from runtime.backends.triton.residual import GpuResidual
from runtime.errors import BackendError

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32
"""Rows, output channels and input channels of a product's tile."""
WARPS, STAGES = 4, 3


class Form(NamedTuple):
    """Compile-time parameters of the product."""

    BITS: int
    ALL: bool  # Whether the channels are all channels, in order
    BLOCK_M: int = BLOCK_M  # See the module, as the next
    BLOCK_N: int = BLOCK_N
    BLOCK_K: int = BLOCK_K


class Factors(NamedTuple):
    """The tensors of a product."""

    x: Any  # float16 [M, K]
    channels: Any  # int32 [k]; None for all channels
    staged: Any  # int32 [k, words]
    scales: Any  # float16 [N], or None at 16 bits


@triton.jit(do_not_specialize=["k"])
def _stage_kernel(codes_ptr, channels_ptr, staged_ptr, k, words, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Copy the rows of codes [K, words] that channels [k] name to staged [k, words]."""
    tiles = tl.cdiv(words, BLOCK)
    for step in tl.range(tl.program_id(0), k * tiles, tl.num_programs(0), num_stages=DEPTH):
        row = step // tiles
        offs = step % tiles * BLOCK + tl.arange(0, BLOCK)
        source = codes_ptr + tl.load(channels_ptr + row).to(tl.int64) * words
        values = tl.load(source + offs, mask=offs < words, other=0, cache_modifier=".cg")
        tl.store(staged_ptr + row.to(tl.int64) * words + offs, values, mask=offs < words)


@triton.jit
def residual_product(rows, factors, k, words, form: tl.constexpr):
    """The product of rows of activations, which the pointers [BLOCK_M, 1] begin, with a block of output channels.

    Returns float32 [BLOCK_M, BLOCK_N], not yet scaled; the block is that of program axis 1.
    """
    BITS: tl.constexpr = form.BITS
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_K: tl.constexpr = form.BLOCK_K
    EACH: tl.constexpr = BLOCK_N * BITS // 32
    offs_w = tl.program_id(1) * EACH + tl.arange(0, EACH)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        inside = offs_k < k
        channels = offs_k
        if not form.ALL:
            channels = tl.load(factors.channels + offs_k, mask=inside, other=0)
        x = tl.load(rows + channels[None, :], mask=inside[None, :], other=0.0)
        place = factors.staged + offs_k.to(tl.int64)[:, None] * words + offs_w[None, :]
        codes = tl.load(place, mask=inside[:, None] & (offs_w < words)[None, :], other=0)
        residuals = tl.reshape(unpack_residuals(codes[:, :, None], BITS).to(tl.float16), [BLOCK_K, BLOCK_N])
        acc = tl.dot(x, residuals, acc)
    return acc


@triton.jit(do_not_specialize=["M", "k"])
def _multiply_kernel(factors, out_ptr, M, N, K, k, words, form: tl.constexpr):
    """Program (i, j): rows of block i, output channels of block j."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the end read the last row again, and are not stored.
    rows = factors.x + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * K
    acc = residual_product(rows, factors, k, words, form)
    if factors.scales is not None:
        acc *= tl.load(factors.scales + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    places = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(places, tl.load(places, mask, other=0.0) + acc, mask)


def stage(codes: torch.Tensor, channels: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy the rows of codes int32 [K, words], in page-locked memory, that channels [k] name to staged [k, words]."""
    k, words = staged.shape
    _stage_kernel[(min(COPY_PROGRAMS, k),)](
        codes, channels, staged, k, words, BLOCK=COPY_WORDS, DEPTH=COPY_DEPTH, num_warps=COPY_WARPS
    )  # fmt: skip


def multiply(
    x: torch.Tensor,
    channels: torch.Tensor | None,
    staged: torch.Tensor,
    scales: torch.Tensor | None,
    bits: int,
    out: torch.Tensor,
) -> None:
    """Add the residuals' part to a product: out[m] += sum over i of x[m, channels[i]] * R̂[channels[i]].

    Args:
        x: float16 [M, K], contiguous.
        channels: int32 [k]; None: all, in order.
        staged: int32 [k, words], the residual rows of these channels in canonical packing.
        scales: float16 [N], of the residuals; None at 16 bits.
        bits: 2, 4, 8 or 16.
        out: float32 [M, N], contiguous, added to.

    Raises:
        BackendError: inconsistent operands.
    """
    (M, K), N, (k, words) = x.shape, out.shape[1], staged.shape
    if k != (K if channels is None else channels.numel()) or words * 32 < N * bits or (scales is None) != (bits == 16):
        raise BackendError(f"{k} rows of {words} words are not the {bits}-bit residuals of a product {[M, K]} x {N}")
    grid = (-(-M // BLOCK_M), -(-N // BLOCK_N))
    if grid[1] > 65535:
        raise BackendError(f"{N} output channels are more than a launch can cover")
    form = Form(BITS=bits, ALL=channels is None)
    _multiply_kernel[grid](
        Factors(x, channels, staged, scales), out, M, N, K, k, words, form=form, num_warps=WARPS, num_stages=STAGES
    )  # fmt: skip


@triton.jit(do_not_specialize=["K", "k", "each", "most"])
def _multiply_experts_kernel(factors, groups, out_ptr, N, K, k, words, each, most, form: tl.constexpr):
    """Program (i, j): pairs of block i, output channels of block j. x [P / each, K], out [P, N]; `Groups`.

    channels are rows of all experts' residuals, [E * k], and staged their copies, [E * k, words].
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    pid_m = tl.program_id(0)
    count = tl.load(groups.blocks + 2 * most + pid_m)
    if count > 0:
        expert = tl.load(groups.blocks + pid_m).to(tl.int64)
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Pairs beyond the end are the last one again, and are not stored.
        order = groups.order + tl.load(groups.blocks + most + pid_m)
        pairs = tl.load(order + tl.minimum(offs_m, count - 1)).to(tl.int64)
        rows = factors.x + (pairs // each)[:, None] * K
        channels = factors.channels
        if not form.ALL:  # rows of all residuals: those before the expert's first one are taken off here
            channels += expert * k
            rows -= expert * K
        own = Factors(None, channels, factors.staged + expert * k * words, None)
        acc = residual_product(rows, own, k, words, form)
        if factors.scales is not None:
            scales = tl.load(factors.scales + expert * N + offs_n, mask=offs_n < N, other=0.0)
            acc *= scales.to(tl.float32)[None, :]
        mask = (offs_m < count)[:, None] & (offs_n < N)[None, :]
        places = out_ptr + pairs[:, None] * N + offs_n[None, :]
        tl.store(places, tl.load(places, mask, other=0.0) + acc, mask)


def multiply_experts(
    x: torch.Tensor, shared: Shared, staged: torch.Tensor, groups: Groups, out: torch.Tensor, *, each: int, block_m: int
) -> None:
    """Add the residuals' part to the products of a prompt's pairs: out[p] += sum over i of x[p, c_i] * R̂_e(p)[c_i].

    x is float16 [P / each, K], `staged` int32 [E * k, words], copies of the shared residuals' channels, and out float32
    [P, N]; `block_m` are the pairs of a block of `groups`.
    """
    residual = shared.residual
    (N, K), count = residual.shape, residual.codes.shape[0] // residual.shape[1]
    k, words, most = staged.shape[0] // count, staged.shape[1], groups.blocks.shape[1]
    form = Form(BITS=residual.bits, ALL=shared.channels is None, BLOCK_M=block_m)
    _multiply_experts_kernel[most, triton.cdiv(N, BLOCK_N)](
        Factors(x, shared.channels, staged, residual.scales), groups, out, N, K, k, words, each, most, form=form,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A layer's residuals shared by prompt rows."""

    residual: GpuResidual
    channels: torch.Tensor | None
    """int32 [k] on the device, ascending; None: all channels. Of experts the rows of `residual.codes`, [E * k]."""
    selection: Selection | None = None
    """Of experts: the same channels as a selection, with which a few rows fetch those of their experts alone."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and words to copy to the device."""
        K, words = self.residual.codes.shape
        return (K if self.channels is None else self.channels.numel()), words


class Staging:
    """Copies residuals to the device, in the order in which a step's layers run, on a stream; None: the current one.

    Raises torch.OutOfMemoryError if the device has no room for the buffers.
    """

    def __init__(self, layers: Sequence[Shared], device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._layers, self._stream = layers, stream
        largest = max((rows * words for rows, words in (layer.shape for layer in layers)), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.int32, device=device) for _ in range(2)]
        self._arrived: list[torch.cuda.Event | None] = [None, None]
        self._step: Sequence[Shared] = ()
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, *, few: bool = False) -> None:
        """Begin a step: start copying the first layer's residuals, if any layer has some.

        Args:
            few: Whether the step's rows are so few that they fetch experts' residuals by themselves.
        """
        self._next = 0
        self._step = [layer for layer in self._layers if layer.selection is None or not few]
        if self._step:
            self._fetch(0)

    def take(self) -> torch.Tensor:
        """The next layer's residuals, int32 [k, words], valid until the call after the next; copies the following."""
        own = self._next
        arrived = self._arrived[own % 2]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        self._next += 1
        if self._next < len(self._step):
            self._fetch(self._next)
        return self._place(own)

    def _place(self, number: int) -> torch.Tensor:
        rows, words = self._step[number].shape
        return self._buffers[number % 2][: rows * words].view(rows, words)

    def _fetch(self, number: int) -> None:
        """Start copying a layer's residuals after all earlier launches, including the last reader of its buffer."""
        layer, to = self._step[number], self._place(number)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if layer.channels is None:
                to.copy_(layer.residual.codes, non_blocking=True)
            else:
                stage(layer.residual.codes, layer.channels, to)
            if self._stream is not None:
                self._arrived[number % 2] = self._stream.record_event()
