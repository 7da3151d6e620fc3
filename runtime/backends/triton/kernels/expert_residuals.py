"""Compensation of experts on the GPU: residuals of those that the router chose, read where the others stay.

The residuals of a block's experts lie one behind the other in page-locked memory, and a kernel finds an expert's by its
number, which it reads on the device. A few rows fetch each for their own experts, channel by channel, as
`runtime.backends.triton.kernels.compensate` does: at `gate_up` all experts of a row share its channels, at `down` each
has its own, and what they add is summed up in the order of their numbers. A prompt's pairs (a row and one of its
experts), grouped by expert, multiply with copies on the device as `runtime.backends.triton.kernels.residual_gemm` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.backends.triton.carveout import leave_room
from runtime.backends.triton.kernels.compensate import (
    Fetch,
    Output,
    Residual,
    load_rows,
    load_words,
    unpack_residuals,
)
from runtime.backends.triton.kernels.experts import Choice
from runtime.backends.triton.kernels.grouping import Groups
from runtime.backends.triton.kernels.residual_gemm import BLOCK_N, STAGES, WARPS, Factors, Form, residual_product
from runtime.backends.triton.kernels.select import NUM_WARPS, Chosen, Selection, select
from runtime.backends.triton.residual import LINE_WORDS, GpuResidual
from runtime.backends.triton.staging import Shared
from runtime.backends.triton.workspace import Workspace

_LINE = tl.constexpr(LINE_WORDS)
_ALIGNMENT = 16
"""Alignment of parts of the workspace buffer in elements, so that every call compiles to the same kernel."""


@triton.jit(do_not_specialize=["k", "N", "K", "lines"])
def _fetch_experts_kernel(salient, choice, residual, output, k, N, K, lines, SUMMED: tl.constexpr, fetch: tl.constexpr):
    """Program (p, m) of n_tb x M writes its lines for the experts of row m, line by line and expert by expert.

    codes [E * K, lines * 32]; salient [M, k] and out [P, N], or, if a row's experts are summed, [P, k] and [M, N].
    """
    BITS: tl.constexpr = fetch.BITS
    ROWS: tl.constexpr = fetch.ROWS
    DEPTH: tl.constexpr = fetch.DEPTH
    WIDTH: tl.constexpr = _LINE * (32 // BITS)
    row = tl.program_id(1).to(tl.int64)
    each = choice.each
    share = tl.cdiv(lines, tl.num_programs(0))
    first = tl.program_id(0) * share
    tiles = tl.cdiv(k, ROWS)
    total = tiles * each * tl.maximum(tl.minimum(share, lines - first), 0)
    sums = tl.zeros([ROWS, _LINE, 32 // BITS], tl.float32)
    added = tl.zeros([WIDTH], tl.float32)
    for step in tl.range(0, total, num_stages=DEPTH):
        tile = step % tiles
        number = step // tiles % each
        line = first + step // (tiles * each)
        pair = row * each + number
        expert = tl.load(choice.chosen + pair).to(tl.int64)
        own = (pair if SUMMED else row) * k
        channels, x = load_rows(Chosen(salient.channels + own, salient.x + own, None), tile, k, ROWS)
        words = load_words(residual.codes + expert * K * lines * _LINE, channels, line, lines)
        sums += unpack_residuals(words, BITS) * x[:, None, None]
        if tile == tiles - 1:
            offs_n = line * WIDTH + tl.arange(0, WIDTH)
            mask_n = offs_n < N
            found = tl.reshape(tl.sum(sums, axis=0), [WIDTH])
            if residual.scales is not None:
                found *= tl.load(residual.scales + expert * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            to = pair
            if SUMMED:
                to = row
                found += tl.where(number > 0, added, 0.0)
                added = found
            if output.base is not None:
                found += tl.load(output.base + to * N + offs_n, mask=mask_n, other=0.0)
            if SUMMED:
                mask_n &= number == each - 1
            tl.store(output.out + to * N + offs_n, found, mask=mask_n)
            sums = tl.zeros([ROWS, _LINE, 32 // BITS], tl.float32)


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


def compensate_experts(
    x: torch.Tensor,
    selection: Selection,
    residual: GpuResidual,
    chosen: torch.Tensor,
    output: Output,
    workspace: Workspace,
    *,
    n_tb: int,
    rest: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Select channels of a few rows, and write (base or 0) + the sum over them of x[c] times their experts' residuals.

    Whether what a row's experts add is summed up is seen from x: it has a row for each pair then. Never waits for the
    device.

    Args:
        x: float16 [M, K], the input of `gate_up`, or [P, K], that of `down`.
        selection: Channel selection.
        residual: Of all experts of the block.
        chosen: int32 [M, each], the experts of every row.
        output: float32 [P, N], or [M, N] where experts are summed up.
        workspace: Memory for the chosen channels, belonging to the current stream.
        n_tb: Programs that fetch for a row.
        rest: The flag of `runtime.backends.triton.kernels.select.select`, and the positions int32 [M].

    Source: QDEC §4.3, Fig. 10.
    """
    (M, each), rows, k = chosen.shape, x.shape[0], selection.k
    summed = output.out.shape[0] == M and rows == M * each
    places = triton.cdiv(rows * k, _ALIGNMENT) * _ALIGNMENT
    buffer = workspace.scratch(2 * places, torch.int32)
    indices, values = buffer[: rows * k], buffer[places : places + rows * k].view(torch.float32)
    flag, positions = rest
    if selection.mode == "random" and summed:
        positions = positions.repeat_interleave(each)
    own = chosen.view(-1) if summed else None
    select(x, selection, indices.view(rows, k), values.view(rows, k), flag, positions=positions, experts=own)
    N, K = residual.shape
    launched = _fetch_experts_kernel[(n_tb, M)](
        Chosen(indices, values, None), Choice(chosen, each), Residual(residual.codes, residual.scales), output,
        k, N, K, residual.lines, SUMMED=summed, fetch=Fetch(BITS=residual.bits), num_warps=NUM_WARPS,
    )  # fmt: skip
    leave_room(launched, x.device, "compensation")


def multiply_experts(
    x: torch.Tensor, shared: Shared, staged: torch.Tensor, groups: Groups, out: torch.Tensor, *, each: int, block_m: int
) -> None:
    """Add the residuals' part to the products of a prompt's pairs: out[p] += sum over i of x[p, c_i] * R̂_e(p)[c_i].

    Args:
        x: float16 [P / each, K], contiguous.
        shared: The experts' residuals, and their channels.
        staged: int32 [E * k, words], copies of these.
        groups: The pairs, grouped.
        out: float32 [P, N], contiguous, added to.
        each: Pairs that read the same row of x.
        block_m: Pairs of a block of `groups`.
    """
    residual = shared.residual
    (N, K), count = residual.shape, residual.codes.shape[0] // residual.shape[1]
    k, words, most = staged.shape[0] // count, staged.shape[1], groups.blocks.shape[1]
    form = Form(BITS=residual.bits, ALL=shared.channels is None, BLOCK_M=block_m)
    _multiply_experts_kernel[most, triton.cdiv(N, BLOCK_N)](
        Factors(x, shared.channels, staged, residual.scales), groups, out, N, K, k, words, each, most, form=form,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
