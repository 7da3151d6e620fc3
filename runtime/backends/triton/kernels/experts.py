"""Products with the matrices of the experts that a step's rows go to, in one launch for all of them.

A row and one of its experts are a *pair*, numbered row by row. For a few rows a program has one pair and some output
channels, and multiplies as `runtime.backends.triton.kernels.gemv` does; so a row has the same bits alone and among
others. Programs of the same channels of all pairs run side by side: an expert that several rows chose is read from
memory once, and then from the cache. A prompt's pairs are grouped by expert, and a program multiplies a block of them
as `runtime.backends.triton.kernels.gemm` does. Groups are cut into blocks of one expert each; how many there are is
only known on the device, so a launch has a program for as many as there could be; those of empty blocks do nothing.

Either way the experts' numbers are read on the device, so a captured graph replays whatever the router chooses. `down`
adds up what a row's experts give in ascending order of their numbers: in the program that finishes last, or, for
prompts, in a launch of its own. The gate has multiplied its input by the experts' shares, so its biases are multiplied
by them here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.experts import GpuExperts
from runtime.backends.triton.kernels.codes import Matrix, Tile, matrix_of, natural_rows, weight_form
from runtime.backends.triton.kernels.gemm import BLOCK_N, DOT, STAGES, multiply_rows
from runtime.backends.triton.kernels.gemm import WARPS as GEMM_WARPS
from runtime.backends.triton.kernels.gemv import WARPS, Operands, configure, multiply_part, options, resident, tile_of
from runtime.backends.triton.sizes import EXPERT_WORDS, SMALLEST_BLOCK
from runtime.backends.triton.workspace import Workspace, capability, leave_room, sm_count
from runtime.errors import BackendError

SMALL, LARGE = SMALLEST_BLOCK, 64
LARGE_FROM = 48
"""Pairs of an expert, on average, from which on large blocks pay: below, most of one would be empty."""
_SUM_CHANNELS = 512
"""Channels of a program that adds up."""
_RUN = tl.constexpr(EXPERT_WORDS)
BLOCK_P = 1024
"""Pairs that a program reads at a time."""
GROUP_WARPS = 4


class Places(NamedTuple):
    """Where each expert's record is."""

    table: Any  # `GpuExperts.places`
    groups: Any  # Runs of `EXPERT_WORDS` words from a record's codes to its groups, or a trellis's scales


class Choice(NamedTuple):
    """The experts that rows go to."""

    chosen: Any  # int32 [M, each]
    each: Any
    shares: Any = None  # float32 [M, each], by which experts' biases are multiplied; None: they are not


@triton.jit
def _matrix_of(matrix, places, expert, form: tl.constexpr):
    """An expert's matrix, from the first one's; addresses of the device and of page-locked memory are one space."""
    codes = matrix.codes + tl.load(places.table + expert) * _RUN
    groups = codes + places.groups * _RUN
    book = groups.to(tl.pointer_type(tl.float16), bitcast=True) if form.KIND == "trellis" else matrix.book
    return Matrix(codes, groups, book, matrix.bias, matrix.N, matrix.K, matrix.exponent)


@triton.jit
def _bias_of(matrix, expert, offs_n):
    """An expert's bias, float32 [BLOCK_N], 0 from N on; matrix.bias is that of all, [E, N]."""
    return tl.load(matrix.bias + expert.to(tl.int64) * matrix.N + offs_n, mask=offs_n < matrix.N, other=0.0)


@triton.jit(do_not_specialize=["split"])
def _few_kernel(
    x_ptr, sums_ptr, matrix, places, choice, out_ptr, parts_ptr, counters_ptr, split,
    SUMMED: tl.constexpr, form: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (p, i, j): pair p, output channels of block i, part j of the input channels.

    x [M, K] and out [P, N]; or, if a row's experts are summed, x [P, K] and out [M, N].
    """
    N, K = matrix.N, matrix.K
    pair, pid_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = pair // choice.each
    expert = tl.load(choice.chosen + pair)
    own = _matrix_of(matrix, places, expert, form)
    stride = K // 32 * 32 if form.EVEN_K else K  # the same, but visibly keeps rows aligned
    source = (pair if SUMMED else row).to(tl.int64)
    given = Operands(x_ptr + source * stride, sums_ptr + source * tl.cdiv(K, 32), own, None, None, 1)
    acc = multiply_part(given, pid_n, part, split, form, tile)
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    offs_n = pid_n * BLOCK_N + natural_rows(BLOCK_N, tile.WARPS)
    if matrix.bias is not None:  # noqa: SIM102 - a constant and a number of the device
        if part == 0:  # a mask instead takes 28 registers more on sm_90, which then holds 4 programs instead of 6
            bias = _bias_of(matrix, expert, offs_n)
            if choice.shares is not None:
                bias *= tl.load(choice.shares + pair)
            acc += bias[:, None]
    to, rows, number, parts = pair, tl.num_programs(0), part, split
    if SUMMED:
        to, rows = row, tl.num_programs(0) // choice.each
        number, parts = pair % choice.each * split + part, choice.each * split
    at_out = to * N + offs_n[:, None]
    mask = (offs_n < N)[:, None]
    if parts == 1:
        tl.store(out_ptr + at_out, acc, mask)
    else:
        tl.store(parts_ptr + number * rows * N + at_out, acc, mask)
        tl.debug_barrier()  # all of the program's part is written before its arrival is counted
        counter = counters_ptr + to * tl.num_programs(1) + pid_n
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            total = tl.zeros([BLOCK_N, 1], dtype=tl.float32)
            for other in range(parts):
                # Past the first-level cache, which doesn't see what other multiprocessors write.
                total += tl.load(parts_ptr + other * rows * N + at_out, mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at_out, total, mask)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["each", "most"])
def _many_kernel(
    x_ptr, matrix, places, groups, shares_ptr, out_ptr, each, most, form: tl.constexpr, tile: tl.constexpr
):
    """Program (i, j): pairs of block i, output channels of block j. x [P / each, K], out [P, N]; `Groups`.

    shares [P], as in `Choice`.
    """
    N, K = matrix.N, matrix.K
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    count = tl.load(groups.blocks + 2 * most + pid_m)
    if count > 0:
        expert = tl.load(groups.blocks + pid_m)
        own = _matrix_of(matrix, places, expert, form)
        offs_m = tl.arange(0, tile.BLOCK_M)
        # Pairs beyond the end are the last one again, and are not stored.
        order = groups.order + tl.load(groups.blocks + most + pid_m)
        pairs = tl.load(order + tl.minimum(offs_m, count - 1))
        stride = K // 32 * 32 if form.EVEN_K else K  # the same, but seen to keep rows aligned
        acc = multiply_rows(x_ptr + (pairs // each).to(tl.int64) * stride, own, pid_n, form, tile)
        offs_n = pid_n * tile.BLOCK_N + natural_rows(tile.BLOCK_N, tile.WARPS)
        if matrix.bias is not None:
            bias = _bias_of(matrix, expert, offs_n)[:, None]
            if shares_ptr is not None:
                # Read again: the pairs themselves would stay in registers, of which there are too few on sm_120.
                pairs_again = tl.load(order + tl.minimum(offs_m, count - 1), volatile=True)
                bias = bias * tl.load(shares_ptr + pairs_again)[None, :]
            acc += bias
        mask = (offs_n < N)[:, None] & (offs_m < count)[None, :]
        tl.store(out_ptr + pairs.to(tl.int64)[None, :] * N + offs_n[:, None], acc, mask)


@triton.jit(do_not_specialize=["each", "N"])
def _sum_kernel(parts_ptr, out_ptr, each, N, BLOCK: tl.constexpr):
    """Program (m, i): channels of block i of row m. parts [M, each, N], out [M, N]."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(each):
        total += tl.load(parts_ptr + (row * each + number) * N + offs_n, mask=offs_n < N, other=0.0)
    tl.store(out_ptr + row * N + offs_n, total, mask=offs_n < N)


def _places(weight: GpuExperts) -> Places:
    return Places(weight.places, weight.sizes.code_words // EXPERT_WORDS)


def block_of(pairs: int, experts: int) -> int:
    """Pairs of a block, by how many an expert has on average."""
    return LARGE if pairs >= LARGE_FROM * experts else SMALL


def few(
    x: torch.Tensor,
    sums: torch.Tensor,
    weight: GpuExperts,
    chosen: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    shares: torch.Tensor | None = None,
    split: int | None = None,
) -> None:
    """Products of a few rows with their experts' matrices plus their biases, each expert's by itself or summed.

    Args:
        x: float16 [M, K], contiguous; or [P, K], a row for each pair, if summed. Of trellises as `rotate` writes it.
        sums: float32 [M or P, ceil(K / 32)], the sums of its pieces (`runtime.backends.triton.kernels.activations`);
            of trellises anything.
        weight: The matrices.
        chosen: int32 [M, each], the experts of every row, on the device: each below `weight.count`.
        out: float32 [P, N], written; or [M, N], if summed.
        workspace: Memory for parts, belonging to the current stream.
        shares: float32 [M, each], the experts' shares: x was multiplied by them, biases are here, and what a row's
            experts give is summed. None: neither.
        split: Parts along the input channels; chosen by `gemv.configure` if None.

    Raises:
        BackendError: operands of the wrong type or shape.
    """
    (M, each), (N, K), form = chosen.shape, weight.shape, weight_form(weight.first)
    pairs, summed = M * each, shares is not None
    _check(x, weight, out, (pairs, M) if summed else (M, pairs))
    major = capability(x.device)
    if split is None:
        # As for a single row, whatever else runs beside it: a row's sums have the same order in every step.
        split = configure(N * each, K, sm_count(x.device), resident(1, form, major)).split
    tile, parts, counters = tile_of(1, form), out, chosen  # of the types that parts have: they share a kernel
    across = triton.cdiv(N, tile.BLOCK_N)
    if split * (each if summed else 1) > 1:
        parts, counters = workspace.scratch(split * pairs * N), workspace.counters(out.shape[0] * across)
    launched = _few_kernel[pairs, across, split](
        x, sums, _matrix_with(weight, out), _places(weight), Choice(chosen, each, shares), out,
        parts, counters, split, SUMMED=summed, form=form, tile=tile, num_warps=WARPS, num_stages=1,
        **options(1, form, major),
    )  # fmt: skip
    leave_room(launched, x.device, "product")


def many(
    x: torch.Tensor,
    weight: GpuExperts,
    groups: Groups,
    out: torch.Tensor,
    *,
    each: int,
    block_m: int,
    shares: torch.Tensor | None = None,
) -> None:
    """Products of a prompt's pairs with their experts' matrices, plus their biases; see `few`.

    x is float16 [P / each, K], out float32 [P, N], and `block_m` are the pairs of a block of `groups`. Raises
    BackendError for operands of the wrong type or shape.
    """
    N, form, most = weight.shape[0], weight_form(weight.first), groups.blocks.shape[1]
    pairs = groups.order.numel()
    _check(x, weight, out, (pairs // each, pairs))
    tile = Tile(DOT=min(DOT, form.SPAN), BLOCK_M=block_m, BLOCK_N=BLOCK_N, WARPS=GEMM_WARPS)
    _many_kernel[most, triton.cdiv(N, BLOCK_N)](
        x, _matrix_with(weight, out), _places(weight), groups, None if weight.bias is None else shares, out,
        each, most, form=form, tile=tile, num_warps=GEMM_WARPS, num_stages=STAGES,
    )  # fmt: skip


def sum_up(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Sum of what each row's experts give, in their order: parts float32 [P, N] -> out [M, N], where M divides P."""
    M, N = out.shape
    _sum_kernel[M, triton.cdiv(N, _SUM_CHANNELS)](parts, out, parts.shape[0] // M, N, BLOCK=_SUM_CHANNELS, num_warps=4)


def _matrix_with(weight: GpuExperts, unused: torch.Tensor) -> Matrix:
    """The first expert's matrix as a kernel argument, with the biases of all, or None."""
    return matrix_of(weight.first, unused)._replace(bias=weight.bias)


def _check(x: torch.Tensor, weight: GpuExperts, out: torch.Tensor, rows: tuple[int, int]) -> None:
    """Raise BackendError if operands are not contiguous float16 [rows, K] and float32 [rows, N]."""
    N, K = weight.shape[0], weight.first.width
    wanted = (("x", x, torch.float16, (rows[0], K)), ("out", out, torch.float32, (rows[1], N)))
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise BackendError(
                f"{weight.first.name}: {name} must be contiguous {dtype} {list(shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )


class Groups(NamedTuple):
    """A step's pairs, grouped."""

    order: Any  # int32 [P], the pairs by expert
    blocks: Any
    """int32 [3, blocks]: the expert of a block, its first place in the order, and its pairs, 0 in empty blocks."""


@triton.jit(do_not_specialize=["pairs", "most", "experts"])
def _group_kernel(
    chosen_ptr, groups, pairs, most, experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Program e orders the pairs of expert e, and cuts them into blocks of BLOCK_M. chosen [P]; `Groups`."""
    own = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    offs_p = tl.arange(0, BLOCK_P)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, pairs, BLOCK_P):
        there = start + offs_p < pairs
        chosen = tl.load(chosen_ptr + start + offs_p, mask=there, other=0)
        counts += tl.histogram(chosen, BLOCK_E, mask=there)
    sizes = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(offs_e < own, counts, 0))
    block = tl.sum(tl.where(offs_e < own, sizes, 0))
    count = tl.sum(tl.where(offs_e == own, counts, 0))
    place = first
    for start in range(0, pairs, BLOCK_P):
        there = start + offs_p < pairs
        mine = there & (tl.load(chosen_ptr + start + offs_p, mask=there, other=0) == own)
        counted = mine.to(tl.int32)
        tl.store(groups.order + place + tl.cumsum(counted) - 1, start + offs_p, mask=mine)
        place += tl.sum(counted)
    for at in range(0, count, BLOCK_M):
        tl.store(groups.blocks + block, own)
        tl.store(groups.blocks + most + block, first + at)
        tl.store(groups.blocks + 2 * most + block, tl.minimum(count - at, BLOCK_M))
        block += 1
    if own == experts - 1:
        for empty in range(block, most):
            tl.store(groups.blocks + 2 * most + empty, 0)


def most_blocks(pairs: int, experts: int, block_m: int) -> int:
    """Most blocks that so many pairs are cut into: every expert's last one may have a single pair."""
    return min(pairs, pairs // block_m + experts)


def group(chosen: torch.Tensor, experts: int, groups: Groups, block_m: int) -> None:
    """Group the pairs of a step, of chosen int32 [M, read], in blocks of `block_m`; never waits for the device."""
    pairs = chosen.numel()
    most = groups.blocks.shape[1]
    assert groups.order.numel() == pairs
    assert most == most_blocks(pairs, experts, block_m)
    block_e = max(16, triton.next_power_of_2(experts))
    _group_kernel[(experts,)](
        chosen, groups, pairs, most, experts, BLOCK_E=block_e, BLOCK_M=block_m, BLOCK_P=BLOCK_P, num_warps=GROUP_WARPS
    )
