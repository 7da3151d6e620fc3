"""The gated delta rule of a prompt's rows, a chunk of them at a time, as products on tensor cores.

A row replaces a value u. Those of a chunk are u = T (v - what the matrix held for their keys before it), where T is the
inverse of a triangular system of the chunk alone. So the systems of all chunks are solved at once; what is left, chunk
after chunk, are a few products with the matrix, by programs of one warp that have 16 of its columns for themselves.

Factors are float32 in two parts of bfloat16 each, which keep 16 bits of any number, however large or small, and sums
are float32: a product is off by some 2^-16 of the lengths of what is multiplied. Outputs are rounded to half precision,
2^-12. Tensor cores make three products of such parts in half the time of three in TF32. The inverse, which is small,
takes those, as good as float32. Decays between two rows are sums of the logarithms between them: a difference of two
sums from the beginning would lose digits behind a row that forgets nearly everything.

Source: Yang et al. 2024 (Gated Delta Networks), §3.3 (the WY representation); `models.recurrent.delta_rule_chunked`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.spec import DeltaSpec
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.sizes import CHUNK
from runtime.backends.triton.workspace import sm_count
from runtime.kv.states import WAITING

_LEAST_K = 32
"""Fewest rows of a padded matrix: tensor cores multiply half of them at a time, 16 or more."""
BLOCK_V = 16
"""Columns of a matrix in a program of one warp, the fewest of a tensor core product, whose operand they are in
registers. Qwen3.5 4B has 256 such programs a sequence."""
RELATE_WARPS = 2
"""Warps of a program that prepares a chunk."""
STAGES, FEW_STAGES = 3, 2
"""Stages of the pipeline in which a program reads chunks: with 3 (40 KB over 128 channels) the next one is on its way
while a chunk is multiplied; with 2 (20 KB), twice as many programs run beside each other."""


class Heads(NamedTuple):
    """Compile-time parameters of a delta rule."""

    KEYS: int  # Query heads, and as many key heads
    VALUES: int  # Value heads, each of which has a matrix
    DK: int  # Channels of a query or key, and rows of a matrix
    DV: int  # Channels of a value
    COLUMNS: int  # Columns of a matrix in memory, a multiple of 16
    SCALE: float  # One over the root of DK
    BLOCK_K: int  # DK, padded to a power of two, and at least `_LEAST_K`
    BLOCK_D: int  # The larger of DK and DV, padded likewise
    BLOCK_H: int  # Value heads, padded likewise
    MAMBA: bool  # Whether it is Mamba-2, whose matrices forget nothing for a new value
    MOST: float  # Of beta
    WAITING: int = WAITING  # Most tokens of a slot that wait
    CHUNK: int = CHUNK


class Mixed(NamedTuple):
    """What the delta rule reads of tokens: normalized queries and keys, values, and for each head beta, log decay."""

    waiting: Any  # float32 [runs * WAITING, inputs], of those that wait, where queries are not written
    rows: Any  # float32 [M, inputs], of a step's rows, where outputs take the places of values
    chunks: Any  # float32 [M, VALUES, 2, CHUNK], how a row depends on those of its chunk (the module)


def heads_of(spec: DeltaSpec, columns: int) -> Heads:
    """The compile-time parameters of a delta rule, whose matrices have so many columns in memory."""
    power = triton.next_power_of_2
    return Heads(
        KEYS=spec.key_heads,
        VALUES=spec.value_heads,
        DK=spec.key_dim,
        DV=spec.value_dim,
        COLUMNS=columns,
        SCALE=spec.key_dim**-0.5,
        BLOCK_K=max(_LEAST_K, power(spec.key_dim)),
        BLOCK_D=power(max(spec.key_dim, spec.value_dim)),
        BLOCK_H=power(spec.value_heads),
        MAMBA=spec.mamba,
        MOST=spec.most,
    )


@triton.constexpr_function
def channels_of(heads):
    """Channels of all queries, keys and values."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * heads.DV


@triton.constexpr_function
def inputs_of(heads):
    """What enters the state of a token: these, and two numbers of each value head."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * (heads.DV + 2)


@triton.constexpr_function
def stride_of(heads):
    """Outputs of the projection for a token: what enters, and gates."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * (2 * heads.DV + 2)


class Parts(NamedTuple):
    """Numbers in two parts of bfloat16, in the memory of float32, as a kernel argument."""

    rows: Any  # bfloat16 [M, 2 * inputs], `Mixed.rows`: high parts of a query or key, then the low ones
    chunks: Any  # bfloat16 [M, VALUES, 2, 2, CHUNK], `Mixed.chunks`, likewise


@triton.constexpr_function
def doublings(size):
    """Binary logarithm of a power of two."""
    return size.bit_length() - 1


@triton.jit
def _split(x):
    """High and low part of float32 numbers."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, acc, CAST: tl.constexpr):
    """The sum acc + a b, of bfloat16 factors. float32."""
    if CAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _multiply(a, high, low, acc, CAST: tl.constexpr):
    """The sum acc + a b, where a is float32, and b in two parts. float32."""
    a_high, a_low = _split(a)
    acc = _dot(a_low, high, acc, CAST)
    acc = _dot(a_high, low, acc, CAST)
    return _dot(a_high, high, acc, CAST)


@triton.jit
def _inverse(system, CHUNK: tl.constexpr):
    """The inverse of I + system, which is strictly lower triangular. float32 [CHUNK, CHUNK].

    Inverses of diagonal blocks give those of blocks twice as large: below them is -C⁻¹ B A⁻¹, where B is below A and
    beside C. No number of such an inverse exceeds 1 in a delta rule; powers of the system may be thousands of times as
    large.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system, 0.0)
    for level in tl.static_range(1, doublings(CHUNK)):
        below = tl.where(((i >> level) != (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1))), system, 0.0)
        left = tl.dot(inverse, below, input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def _store_parts(at, parts, mask, APART: tl.constexpr):
    """Store high parts, and low ones behind them."""
    tl.store(at, parts[0], mask=mask)
    tl.store(at + APART, parts[1], mask=mask)


@triton.jit
def _count_of(run):
    """Rows of a run, whose numbers are at `run`, if its matrices absorb them at once; 0 otherwise."""
    return tl.where(tl.load(run + 3) == 2, tl.load(run + 1), 0)


@triton.jit
def _relate_kernel(mixed, parts, runs_ptr, heads: tl.constexpr, CAST: tl.constexpr):
    """Program (chunk, i, h): how the rows of a chunk of run i depend on each other, by the value heads of key head h.

    Written are two matrices for each value head, the one that makes replaced values and the one that makes outputs of
    these, and in place of queries and keys their parts. runs [., 4] (`runtime.backends.triton.cache.RunTable`).
    """
    CHUNK: tl.constexpr = heads.CHUNK
    DK: tl.constexpr = heads.DK
    KEYS: tl.constexpr = heads.KEYS
    VALUES: tl.constexpr = heads.VALUES
    INPUTS: tl.constexpr = inputs_of(heads)
    SHARED: tl.constexpr = heads.VALUES // heads.KEYS
    HALF: tl.constexpr = heads.BLOCK_K // 2
    key = tl.program_id(2)
    run = runs_ptr + 4 * tl.program_id(1)
    start = tl.program_id(0) * CHUNK
    count = _count_of(run)
    if start < count:
        own = start + tl.arange(0, CHUNK)
        rows, mask_c = tl.load(run).to(tl.int64) + own, own < count
        i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        offs_0 = tl.arange(0, HALF)
        at_q = (rows * INPUTS + key * DK)[:, None] + offs_0[None, :]
        part_q = parts.rows + (rows * INPUTS + key * DK)[:, None] * 2 + offs_0[None, :]
        at_k, part_k = at_q + KEYS * DK, part_q + 2 * KEYS * DK
        mask_0, mask_1 = mask_c[:, None] & (offs_0 < DK)[None, :], mask_c[:, None] & (HALF + offs_0 < DK)[None, :]
        nothing = tl.zeros([CHUNK, CHUNK], tl.float32)
        x_0 = tl.load(mixed.rows + at_k, mask=mask_0, other=0.0)
        x_1 = tl.load(mixed.rows + at_k + HALF, mask=mask_1, other=0.0)
        k_0, k_1 = _split(x_0), _split(x_1)
        held = _multiply(x_0, tl.trans(k_0[0]), tl.trans(k_0[1]), nothing, CAST)
        held = _multiply(x_1, tl.trans(k_1[0]), tl.trans(k_1[1]), held, CAST)
        tl.debug_barrier()  # parts take the places of numbers that other threads have read
        _store_parts(part_k, k_0, mask_0, DK)
        _store_parts(part_k + HALF, k_1, mask_1, DK)
        x_0 = tl.load(mixed.rows + at_q, mask=mask_0, other=0.0)
        x_1 = tl.load(mixed.rows + at_q + HALF, mask=mask_1, other=0.0)
        asked = _multiply(x_0, tl.trans(k_0[0]), tl.trans(k_0[1]), nothing, CAST)
        asked = _multiply(x_1, tl.trans(k_1[0]), tl.trans(k_1[1]), asked, CAST)
        tl.debug_barrier()
        _store_parts(part_q, _split(x_0), mask_0, DK)
        _store_parts(part_q + HALF, _split(x_1), mask_1, DK)
        for head in range(key * SHARED, (key + 1) * SHARED):
            rates = mixed.rows + rows * INPUTS + channels_of(heads) + head
            beta = tl.load(rates, mask=mask_c, other=0.0)
            log_decay = tl.load(rates + VALUES, mask=mask_c, other=0.0)
            until = tl.where(j <= i, log_decay[None, :], 0.0)
            between = tl.dot(until, (i > j).to(tl.float32), input_precision="tf32x3")
            decay = tl.where(j <= i, tl.exp(between), 0.0)
            system = tl.where((j < i) & (not heads.MAMBA), held * decay * beta[:, None], 0.0)
            at = parts.chunks + ((rows * VALUES + head) * (4 * CHUNK))[:, None] + j
            _store_parts(at, _split(_inverse(system, CHUNK) * beta[None, :]), mask_c[:, None], CHUNK)
            _store_parts(at + 2 * CHUNK, _split(asked * decay), mask_c[:, None], CHUNK)


@triton.jit
def _parts_at(at, offs_k, heads: tl.constexpr):
    """Parts of some channels of queries or keys, whose high ones are at `at`."""
    if heads.DK == heads.BLOCK_K:
        return tl.load(at), tl.load(at + heads.DK)
    mask = (offs_k < heads.DK)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + heads.DK, mask=mask, other=0.0)


@triton.jit
def _chunk_kernel(
    mixed, parts, matrices_ptr, rows, runs_ptr, skip_ptr, heads: tl.constexpr, BLOCK_V: tl.constexpr, CAST: tl.constexpr
):  # fmt: skip
    """Program (i, h, block): columns [block * BLOCK_V, ...) of the matrix of value head h meet the chunks of run i.

    The matrix is turned, and in two halves along its DK rows, of which one has its parts in registers at a time.
    matrices [slots, VALUES, DK, COLUMNS]; others as in `_relate_kernel`.
    """
    CHUNK: tl.constexpr = heads.CHUNK
    DK: tl.constexpr = heads.DK
    KEYS: tl.constexpr = heads.KEYS
    VALUES: tl.constexpr = heads.VALUES
    INPUTS: tl.constexpr = inputs_of(heads)
    HALF: tl.constexpr = heads.BLOCK_K // 2
    run = runs_ptr + 4 * tl.program_id(0)
    head = tl.program_id(1)
    count = _count_of(run)
    if count > 0:
        first = tl.load(run).to(tl.int64)
        slot = tl.load(rows.slots + first).to(tl.int64)
        offs_c = tl.arange(0, CHUNK)
        offs_0 = tl.arange(0, HALF)
        offs_1 = HALF + offs_0
        offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_v = (offs_v < heads.DV)[:, None]
        here = matrices_ptr + (slot * VALUES + head) * (DK * heads.COLUMNS) + offs_v[:, None]
        here_0, here_1 = here + offs_0[None, :] * heads.COLUMNS, here + offs_1[None, :] * heads.COLUMNS
        inside = (offs_v < heads.COLUMNS)[:, None]
        matrix_0 = tl.load(here_0, mask=inside & (offs_0 < DK)[None, :], other=0.0)
        matrix_1 = tl.load(here_1, mask=inside & (offs_1 < DK)[None, :], other=0.0)
        # A run is short enough for offsets of 32 bits, which begin at its first row.
        first_q = parts.rows + (first * INPUTS + head // (VALUES // KEYS) * DK) * 2
        first_chunk = parts.chunks + (first * VALUES + head) * (4 * CHUNK)
        first_value = mixed.rows + first * INPUTS + 2 * KEYS * DK + head * heads.DV
        first_decay = mixed.rows + first * INPUTS + channels_of(heads) + VALUES + head
        nothing = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        for start in range(0, count, CHUNK):
            mask_c = start + offs_c < count
            own = tl.minimum(start + offs_c, count - 1)  # beyond the end the last row again, which changes nothing
            at_q = first_q + (own[:, None] * (2 * INPUTS) + offs_0[None, :])
            q_0, q_1 = _parts_at(at_q, offs_0, heads), _parts_at(at_q + HALF, offs_1, heads)
            at_k = at_q + 2 * KEYS * DK
            k_0, k_1 = _parts_at(at_k, offs_0, heads), _parts_at(at_k + HALF, offs_1, heads)
            at = first_chunk + (own[:, None] * (VALUES * 4 * CHUNK) + offs_c[None, :])
            replaces, reads = (tl.load(at), tl.load(at + CHUNK)), (tl.load(at + 2 * CHUNK), tl.load(at + 3 * CHUNK))
            values = first_value + (own[None, :] * INPUTS + offs_v[:, None])
            v = tl.load(values, mask=mask_v, other=0.0)
            log_decay = tl.load(first_decay + own * INPUTS, mask=mask_c, other=0.0)
            later = offs_c[:, None] > offs_c[None, :]
            until = tl.exp(tl.sum(tl.where(later, 0.0, log_decay[:, None]), axis=0))[None, :]
            after = tl.exp(tl.sum(tl.where(later, log_decay[:, None], 0.0), axis=0))
            after = tl.where(mask_c, after, 0.0)[None, :]
            whole = tl.exp(tl.sum(log_decay, axis=0))
            known = _multiply(matrix_0, tl.trans(k_0[0]), tl.trans(k_0[1]), nothing, CAST)
            y = _multiply(matrix_0, tl.trans(q_0[0]), tl.trans(q_0[1]), nothing, CAST)
            known = _multiply(matrix_1, tl.trans(k_1[0]), tl.trans(k_1[1]), known, CAST)
            y = _multiply(matrix_1, tl.trans(q_1[0]), tl.trans(q_1[1]), y, CAST)
            new = v if heads.MAMBA else v - known * until
            u = _multiply(new, tl.trans(replaces[0]), tl.trans(replaces[1]), nothing, CAST)
            y = _multiply(u, tl.trans(reads[0]), tl.trans(reads[1]), y * until, CAST)
            if heads.MAMBA:
                y += tl.load(skip_ptr + head) * v
            tl.store(values, y, mask=mask_c[None, :] & mask_v)
            matrix_0 = _multiply(u * after, k_0[0], k_0[1], matrix_0 * whole, CAST)
            matrix_1 = _multiply(u * after, k_1[0], k_1[1], matrix_1 * whole, CAST)
        tl.store(here_0, matrix_0, mask=inside & (offs_0 < DK)[None, :])
        tl.store(here_1, matrix_1, mask=inside & (offs_1 < DK)[None, :])


def delta_rule_chunked(
    mixed: Mixed,
    matrices: torch.Tensor,
    rows: Rows,
    runs: torch.Tensor,
    heads: Heads,
    skip: torch.Tensor | None = None,
) -> None:
    """Have matrices meet those rows of a step that they absorb at once.

    `mixed` is what the rows are made of; their values become outputs, and their queries and keys are overwritten. The
    matrices float32 [slots, VALUES, DK, COLUMNS] have absorbed what waited. `runs` are int32 [., 4] (`RunTable`),
    `skip` is Mamba-2's D float32 [VALUES].
    """
    parts = Parts(mixed.rows.view(torch.bfloat16), mixed.chunks.view(torch.bfloat16))
    cast = not matrices.is_cuda  # the interpreter's products take bfloat16 for integers
    chunks, blocks = triton.cdiv(len(mixed.rows), heads.CHUNK), triton.cdiv(heads.COLUMNS, BLOCK_V)
    _relate_kernel[(chunks, len(runs), heads.KEYS)](
        mixed, parts, runs, heads=heads, CAST=cast, num_warps=RELATE_WARPS, num_stages=1
    )
    stages = STAGES if heads.VALUES * blocks <= 2 * sm_count(matrices.device) else FEW_STAGES
    _chunk_kernel[(len(runs), heads.VALUES, blocks)](
        mixed, parts, matrices, rows, runs, skip, heads=heads, BLOCK_V=BLOCK_V, CAST=cast, num_warps=1,
        num_stages=stages,
    )  # fmt: skip
