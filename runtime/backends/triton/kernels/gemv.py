"""Product of a low-bit matrix with one or a few tokens on the GPU: memory-bound, with three instructions per weight.

Products run on tensor cores although one token fills a single column of them: that leaves only the unpacking. A word
holds the codes of two channels at the same bits of its two halves (`runtime.backends.triton.layout`). Shifted to the
top of a half's mantissa and joined with a constant exponent they *are* the numbers 2^bits + code, exactly, two in one
register, in the form that tensor cores take: one shift and one AND-OR for two weights, without integer conversions. The
excess, 2^bits + zero for each weight, is subtracted from a group's sum at once: it is that constant times the sum of
the group's activations, which the kernel that wrote the activations also stores
(`runtime.backends.triton.kernels.activations`). A group's scale is applied once as well, in float32.

A program keeps one block of codes in registers. As soon as a word of it has been multiplied, the same registers are
loaded with that word of the next block, which then has three quarters of a block's time to arrive; so nearly a whole
block is always in flight, without shared memory. The machine code scheduler would move such loads to the end of the
loop, just before they are needed; a barrier after each word prevents this. (Copies to shared memory were tried: with
two stages, Triton's pipeline has one buffer, and the machine code waited for each copy right after issuing it.)

For one token, activations and scales are loaded directly into the registers that need them: the loads are smaller than
a program has threads, which makes the compiler repeat them instead of passing them through shared memory.

The levels of a trellis are computed, two at once, in 8 instructions a weight all in all (`codes`). A table would take
6, as a codebook does, but its 256 entries lie in four lines, and lookups of a warp wait for all of them.

Codebooks are looked up with one load a weight: 16 or 32 bytes an output channel stay in the first-level cache, where
the 32 lookups of a warp touch two lines. With shuffles they were four, in a tree of selections fifteen instructions.

A matrix with few output channels is split along its input channels too. The last program of an output block to finish
adds the parts in a fixed order, so results are reproducible; it resets its counter to zero, so that a captured graph
can run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.kernels.codes import (
    Form,
    Tile,
    halves_of,
    load_behind,
    matrix_of,
    natural_rows,
    overlap,
    row_words,
    scaled,
    spare_bit,
    tail_tile,
    tail_words,
    top_of,
    values_of,
    weight_form,
)
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.sizes import BLOCK, SUMMED_ROWS, pieces
from runtime.backends.triton.workspace import Workspace, capability, leave_room, sm_count
from runtime.errors import BackendError

ROWS = SUMMED_ROWS
"""Most tokens of a product."""
TILE_ROWS = 8
"""Tokens of one tile of a tensor core; more take two, which takes fewer instructions than reading weights again."""
WARPS = 2
"""Warps of a program. With four, the compiler may choose Hopper's warp-group products, whose operands lie elsewhere."""
DOT_ROWS = 64
"""Most channels unpacked at a time for several tokens."""
BUSY = 6
"""Concurrent programs per multiprocessor needed to keep its share of the memory busy: on an H200, a program takes 3 µs
for a block of 4-bit codes, however many others run, and a multiprocessor can receive one in 0.5 µs."""
REGISTERS = {(8, 4): 168, (9, 3): 168, (10, 4): 255}
"""Registers of a thread that the assembler may use for one token, by major compute capability and bits. At 3 bits it
would take 173, and a multiprocessor would hold 4 programs instead of 6: on an H200, Llama 3 8B's four matrices then
took 62 µs instead of 57. At 4 bits it would stop at 128 on sm_80 and at 168 on sm_100, and spill."""
OVERHEAD = 0.75
"""Overhead of a program, in blocks: its start, and writing and counting its part. With these numbers `configure` finds
the fastest division, or one within 1 %, of each of Llama 3 8B's matrices on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Division of a product into programs."""

    block_n: int = 64
    """Output channels of a program: a power of two, at least 16 for each warp. With 64, an activation that was loaded
    serves two tensor core tiles, and a program has 16 KiB of 4-bit codes on the way."""
    split: int
    """Parts along the input channels."""

    def __post_init__(self) -> None:
        """Check against what the kernel's layout of rows needs."""
        if self.block_n < 16 * WARPS or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n must be a power of two from {16 * WARPS} on, not {self.block_n}")
        if self.split < 1:
            raise ValueError(f"split must be at least 1, not {self.split}")


class Next(NamedTuple):
    """The block that a program multiplies next, within the kernel."""

    rows: Any  # The first words of the rows, pointers [BLOCK_N, 16]
    at: Any  # Its first word from there, a 32-bit number, which takes a register less than pointers
    there: Any
    more: Any  # Whether anything follows it in the rows


class Operands(NamedTuple):
    """Operands of a program, within the kernel."""

    x: Any  # float16 [M, K]
    sums: Any  # float32 [M, ceil(K / 32)], the sums of the pieces of x, of uniform groups; None else
    matrix: Any
    book: Any  # Codebooks of the program's rows, if there are any, pointers [BLOCK_N, 1]
    first_n: Any  # The first 8 rows of every 16 of the tile, int32 [BLOCK_N / 2]
    M: Any  # None: one token


class Results(NamedTuple):
    """Where a product goes."""

    out: Any  # float32 [M, N]
    parts: Any  # float32 [split, M, N], of a split product
    counters: Any  # int32 [blocks of output channels], how many parts of each have arrived


class Product(NamedTuple):
    """A product, ready to be launched."""

    given: Operands
    results: Results
    biased: int
    across: int  # Blocks of output channels
    split: int
    form: Form
    tile: Tile
    options: dict[str, int]


def resident(M: int, form: Form, major: int) -> int:
    """Programs that a multiprocessor holds at the same time, by registers (`make kernels`).

    Further ones form a second wave, which begins without a block on its way and lasts as long as a whole one: for Llama
    3 8B's down at 3 bits on an H200, 640 programs took 22.6 µs where there was room for 528, and 512 took 16.9.
    """
    limited = options(M, form, major).get("maxnreg", 255) <= 168
    four = (major != 10 and form.KIND == "uniform") or (major == 12 and form.KIND == "minimums")
    small = form.KIND in ("codebook", "trellis") or (form.BITS == 4 and four)
    return 6 if M == 1 and (limited or small) else 4


@cache
def configure(N: int, K: int, sm_count: int, resident: int) -> LaunchConfig:
    """Choose the division of a matrix [N, K] for a device of so many multiprocessors, each with `resident` programs.

    The busiest multiprocessor is the bottleneck: it gets ceil(programs / multiprocessors) programs, in waves of
    `resident`; a wave of fewer than `BUSY` waits for memory as long as one of `BUSY`. The division with the least sum
    over waves of max(programs, BUSY) * (blocks of a program + `OVERHEAD`) is chosen; ties go to the fewest parts.
    """
    blocks, across = -(-K // BLOCK), -(-N // 64)

    def cost(split: int) -> float:
        waves, rest = divmod(-(-across * split // sm_count), resident)
        programs = waves * max(resident, BUSY) + (max(rest, BUSY) if rest else 0)
        return programs * (-(-blocks // split) + OVERHEAD)

    return LaunchConfig(split=min(range(1, blocks + 1), key=cost))


@triton.jit
def _load_x(ops, offs_k, form: tl.constexpr, tile: tl.constexpr):
    """Activations of channels [DOT]: float16 [DOT, BLOCK_M]; rows beyond the end repeat the last."""
    if tile.BLOCK_M == 1:
        x = tl.load(ops.x + offs_k) if form.EVEN_K else tl.load(ops.x + offs_k, offs_k < ops.matrix.K, 0.0)
        x = x[:, None]
    else:
        offs_m = tl.minimum(tl.arange(0, tile.BLOCK_M), ops.M - 1)
        stride = ops.matrix.K // 32 * 32 if form.EVEN_K else ops.matrix.K  # the same, but visibly keeps rows aligned
        at = ops.x + offs_k[:, None] + (offs_m * stride)[None, :]
        x = tl.load(at) if form.EVEN_K else tl.load(at, mask=(offs_k < ops.matrix.K)[:, None], other=0.0)
    return x


@triton.jit
def _sum_of_x(ops, piece, PIECES: tl.constexpr, tile: tl.constexpr):
    """Sum of the activations of some pieces: float32, one number, or [1, BLOCK_M]."""
    at = ops.sums + piece
    if tile.BLOCK_M > 1:
        at += tl.minimum(tl.arange(0, tile.BLOCK_M), ops.M - 1) * tl.cdiv(ops.matrix.K, 32)
    total = tl.load(at)
    for later in tl.static_range(1, PIECES):
        total += tl.load(at + later)
    return total if tile.BLOCK_M == 1 else total[None, :]


@triton.jit
def _apply_group(
    acc, sums, ops, block, SPAN_AT: tl.constexpr, PIECES: tl.constexpr, form: tl.constexpr, tile: tl.constexpr
):
    """Add a span's sums to those of the program: less what codes are too large by, times the scale of their group."""
    if form.KIND == "uniform" or form.KIND == "minimums":
        group = (block * 512 + SPAN_AT) // form.GROUP_SIZE
        N = ops.matrix.N
        scale, offset = halves_of(row_words(ops.matrix.groups, group * N, ops.first_n, N, tile.BLOCK_N, tile.WARPS))
        sum_of_x = _sum_of_x(ops, block * 16 + SPAN_AT // 32, PIECES, tile)
        if form.KIND == "uniform":
            sums += offset.to(tl.float32)[:, None] * sum_of_x
        else:  # of codes alone; adding the minimums to the scaled sums instead would spill more registers
            acc += offset.to(tl.float32)[:, None] * sum_of_x
        sums *= scale.to(tl.float32)[:, None]
    return acc + sums


@triton.constexpr_function
def _ends(word, form, start, dot):
    """Whether a word of a block ends within `dot` channels from `start` on; its last piece is among them."""
    pieces = (16 * word + 15) // form.BITS + 1 if form.KIND == "trellis" else 16 // form.BITS * (word + 1)
    return start < 32 * pieces <= start + dot


@triton.jit
def _reload(word, following, offset, form: tl.constexpr):
    """The same word of the next block, or this one where there is none."""
    if following.there:
        word = tl.load(following.rows + (following.at + offset))
    if form.KIND != "codebook":  # there, look-ups are the limit, and registers spill on sm_80
        tl.debug_barrier()  # keeps the load here, see the module
    return word


@triton.jit
def _add_block(acc, words, ops, block, following, PIECES: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """Multiply PIECES pieces of a block, and load the words of the next one as those of this one are used up.

    Args (tensors): float32 [BLOCK_N, BLOCK_M], the sums; the block's words (`load_words`), but where another block
    follows without piece 15 of 3 bits, and of a trellis with the last as `load_behind` gives it; its number; the `Next`
    one, None where nothing is to be loaded.

    Returns:
        The sums, and the words of the next block.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    SPAN: tl.constexpr = form.SPAN
    DOT: tl.constexpr = tile.DOT
    SPARE: tl.constexpr = form.BITS == 3 and form.KIND != "trellis"
    w0, w1, w2, w3, w4 = words
    N = ops.matrix.N
    if form.KIND == "trellis" and following is not None:
        w4 = overlap(w0, w4)
    for span in tl.static_range(0, PIECES * 32, SPAN):
        sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in tl.static_range(span, min(span + SPAN, PIECES * 32), DOT):
            if following is not None and SPARE:  # piece 15 is gathered before the words that keep it go
                if _ends(0, form, start, DOT):
                    w3 = spare_bit(w0, 0, top_of(form))
                if _ends(1, form, start, DOT):
                    w3 |= spare_bit(w1, 1, top_of(form))
                if _ends(2, form, start, DOT):
                    w3 |= spare_bit(w2, 2, top_of(form))
            x = _load_x(ops, block * 512 + start + tl.arange(0, DOT), form, tile)
            w = values_of((w0, w1, w2, w3, w4), ops.book, ops.matrix.exponent, start // 32, form, tile)
            if form.KIND == "minimums":
                w -= 1 << form.BITS
            sums = tl.dot(w, x, sums)
            if following is not None:
                if _ends(0, form, start, DOT):
                    w0 = _reload(w0, following, 0, form)
                if _ends(1, form, start, DOT):
                    w1 = _reload(w1, following, N * 16, form)
                if form.BITS > 2 and _ends(2, form, start, DOT):
                    w2 = _reload(w2, following, N * 32, form)
                if form.BITS > 3 and _ends(3, form, start, DOT):
                    w3 = _reload(w3, following, N * 48, form)
                if form.KIND == "trellis" and start + DOT == 512 and following.there:
                    w4 = load_behind(following.rows, following.at, N, following.more, form)
        acc = _apply_group(acc, sums, ops, block, span, min(SPAN // 32, PIECES - span // 32), form, tile)
    return acc, (w0, w1, w2, w3, w4)


@triton.jit
def multiply_part(given, pid_n, part, split, form: tl.constexpr, tile: tl.constexpr):
    """Output channels of block pid_n, of one part of the input channels: float32 [BLOCK_N, BLOCK_M].

    Their order is that of `natural_rows`; the `Operands` are given without what belongs to the block.
    """
    matrix = given.matrix
    N = matrix.N
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BITS: tl.constexpr = form.BITS
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    WARPS: tl.constexpr = tile.WARPS
    # Rows beyond the end read the last row again, and are not stored.
    load_n = tl.minimum(pid_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    half = tl.arange(0, BLOCK_N // 2)
    first_n = pid_n * BLOCK_N + half // (8 * WARPS) * (16 * WARPS) + half // 8 % WARPS * 8 + half % 8
    ops = Operands(given.x, given.sums, matrix, matrix.book + (load_n << BITS)[:, None], first_n, given.M)
    codes = matrix.codes + load_n[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    blocks = tl.cdiv(matrix.K, 32) // 16
    rest = (tl.cdiv(matrix.K, 32) % 16 > 0).to(tl.int32)
    each = (blocks + rest - 1) // split + 1  # not `cdiv`, whose split - 1 would stay in a register until the end
    begin, behind = part * each, (part + 1) * each
    end = tl.minimum(blocks, behind)
    if begin < end:
        at = codes + begin * BITS * N * 16
        w0, w1 = tl.load(at), tl.load(at + N * 16)
        w2 = tl.load(at + N * 32) if BITS > 2 else w1
        w3 = tl.load(at + N * 48) if BITS > 3 else w2
        w4 = load_behind(at, 0, N, begin + 1 < blocks + rest, form) if form.KIND == "trellis" else w3
        for block in range(begin, end):
            following = Next(codes, (block + 1) * BITS * N * 16, block + 1 < end, block + 2 < blocks + rest)
            acc, words = _add_block(acc, (w0, w1, w2, w3, w4), ops, block, following, 16, form, tile)
            w0, w1, w2, w3, w4 = words
    if form.TAIL > 0:  # noqa: SIM102 - a constant and a number of the device
        if (rest > 0) & (begin <= blocks) & (blocks < behind):
            words = tail_words(matrix.codes, load_n, N, blocks, form)
            acc, words = _add_block(acc, words, ops, blocks, None, form.TAIL, form, tail_tile(form, tile))
    return scaled(acc, matrix, pid_n, form, tile)


@triton.jit(do_not_specialize=["biased", "M", "split"])
def _gemv_kernel(
    x_ptr, sums_ptr, matrix, biased, out_ptr, parts_ptr, counters_ptr, M, split, form: tl.constexpr, tile: tl.constexpr
):
    """Program (i, j): output channels of block i, part j of the input channels, up to BLOCK_M tokens."""
    given, results = Operands(x_ptr, sums_ptr, matrix, None, None, M), Results(out_ptr, parts_ptr, counters_ptr)
    write_part(given, results, biased, tl.program_id(0), tl.program_id(1), split, form, tile)


@triton.jit
def write_part(given, results, biased, pid_n, part, split, form: tl.constexpr, tile: tl.constexpr):
    """Multiply a part of block pid_n's output channels, and write them if it is the last to arrive."""
    matrix = given.matrix
    N = matrix.N
    M = 1 if given.M is None else given.M
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    WARPS: tl.constexpr = tile.WARPS
    acc = multiply_part(given, pid_n, part, split, form, tile)
    offs_n = pid_n * BLOCK_N + natural_rows(BLOCK_N, WARPS)  # behind the loop, which has no registers for it
    offs_m = tl.arange(0, BLOCK_M)
    at_out = offs_m[None, :] * N + offs_n[:, None]
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    bias = tl.load(matrix.bias + offs_n, mask=(offs_n < N) & (biased != 0), other=0.0)[:, None]
    if split == 1:
        tl.store(results.out + at_out, acc + bias, mask)
    else:
        tl.store(results.parts + part * M * N + at_out, acc, mask)
        tl.debug_barrier()  # all of the program's part is written before its arrival is counted
        if tl.atomic_add(results.counters + pid_n, 1, sem="acq_rel") == split - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for other in range(split):
                # Past the first-level cache, which doesn't see what other multiprocessors write.
                total += tl.load(results.parts + other * M * N + at_out, mask, other=0.0, cache_modifier=".cg")
            tl.store(results.out + at_out, total + bias, mask)
            tl.store(results.counters + pid_n, 0)


def few_rows(
    x: torch.Tensor,
    weight: GpuLinear,
    out: torch.Tensor,
    workspace: Workspace,
    config: LaunchConfig | None = None,
    *,
    sums: torch.Tensor | None = None,
) -> None:
    """The product of a low-bit matrix with one or a few tokens, plus the bias: out = x Ŵᵀ + b.

    Args:
        x: float16 [M, K], contiguous, M from 1 to `ROWS`; of a trellis as `rotate` writes it.
        weight: The matrix.
        out: float32 [M, N], written.
        workspace: Memory for the parts of a split product, belonging to the current stream.
        config: The division of the product; chosen by `configure` if None.
        sums: float32 [M, ceil(K / 32)], the sums of the pieces of x, if the kernel that wrote x stored them; None: a
            separate kernel computes them first.

    Raises:
        BackendError: operands of the wrong type or shape, or too many tokens.
    """
    given, results, biased, across, split, form, tile, more = prepare(x, weight, out, workspace, config, sums=sums)
    launched = _gemv_kernel[across, split](
        given.x, given.sums, given.matrix, biased, *results, given.M, split,
        form=form, tile=tile, num_warps=WARPS, num_stages=1, **more,
    )  # fmt: skip
    leave_room(launched, x.device, "product")


def prepare(
    x: torch.Tensor,
    weight: GpuLinear,
    out: torch.Tensor,
    workspace: Workspace,
    config: LaunchConfig | None = None,
    *,
    sums: torch.Tensor | None = None,
) -> Product:
    """What `few_rows` launches, with its arguments; sums that are missing are computed now."""
    check_operands(x, weight, out)
    M, N, K = x.shape[0], weight.shape[0], weight.width
    if M > ROWS:
        raise BackendError(f"{weight.name}: {M} rows at once; this kernel takes {ROWS}, use gemm")
    form, major = weight_form(weight), capability(x.device)
    if config is None:
        config = configure(N, K, sm_count(x.device), resident(M, form, major))
    if form.KIND not in ("uniform", "minimums"):
        sums = None
    elif sums is None:
        sums = workspace.sums(M, pieces(K))
        piece_sums(x, sums)
    across, split = -(-N // config.block_n), config.split
    parts, counters = out, weight.codes  # of the types that a split product has: it shares its kernel
    if split > 1:
        parts, counters = workspace.scratch(split * M * N), workspace.counters(across)
    given, results = Operands(x, sums, matrix_of(weight, out), None, None, M), Results(out, parts, counters)
    tile, biased = tile_of(M, form, config.block_n), int(weight.bias is not None)
    return Product(given, results, biased, across, split, form, tile, options(M, form, major))


def options(M: int, form: Form, major: int) -> dict[str, int]:
    """Further options of the compiler, for a device of this major compute capability."""
    if 1 < M <= TILE_ROWS and (major, form.KIND, form.BITS) == (10, "uniform", 3):
        return {"maxnreg": 216}  # from 160 to 208, and at 255, some are spilled
    if M > 1 or form.KIND == "codebook":
        return {}
    if form.KIND == "trellis":  # at 4 bits up to 184 otherwise, which leave room for 4 programs; others stop at 168
        return {"maxnreg": 168} if form.BITS == 4 else {}
    if form.TAIL > 0 and (form.BITS == 3 or major == 10):  # what others have would spill, on Hopper 40 bytes of 168
        return {"maxnreg": 255} if major == 8 else {}  # Ampere and Ada would stop at 168 by themselves
    limit = REGISTERS.get((major, form.BITS))
    return {} if limit is None else {"maxnreg": limit}


def tile_of(M: int, form: Form, block_n: int = 64) -> Tile:
    block_m = 1 if M == 1 else TILE_ROWS if M <= TILE_ROWS else ROWS
    narrow = M == 1 or form.KIND == "trellis" or (M > TILE_ROWS and form.BITS == 4)  # the latter spill otherwise
    dot = 32 if narrow else min(form.SPAN, DOT_ROWS)
    return Tile(DOT=dot, BLOCK_M=block_m, BLOCK_N=block_n, WARPS=WARPS)


def check_operands(x: torch.Tensor, weight: GpuLinear, out: torch.Tensor) -> None:
    """Raise BackendError unless x is float16 [M, K], out float32 [M, N], and both contiguous."""
    (N, _), K = weight.shape, weight.width
    for name, tensor, dtype, width in (("x", x, torch.float16, K), ("out", out, torch.float32, N)):
        if tensor.dtype != dtype or tensor.ndim != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
            raise BackendError(
                f"{weight.name}: {name} must be contiguous {dtype} with rows of {width}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if x.shape[0] != out.shape[0] or not x.shape[0]:
        raise BackendError(f"{weight.name}: {x.shape[0]} rows of activations for {out.shape[0]} rows of results")
