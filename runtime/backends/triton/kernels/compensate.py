"""Error compensation on the GPU: selects channels, fetches their residual rows over PCIe, multiplies and adds.

Residuals stay in page-locked host memory and are read from there directly (zero-copy). A row is a sequence of lines of
32 words = 128 bytes, the largest read that a GPU issues on the bus; at 4 bits a line holds the 256 outputs of one
segment of QDEC's appendix A.1. Program p of n_tb handles ceil(lines / n_tb) adjacent lines of every chosen row, ROWS
rows at a time: eight threads read one line with 16 bytes each, so that it crosses the bus as one request.

A fetch is limited by the bytes in flight: 16 to 32 GB/s at a latency near 1.5 µs require 24 to 48 KB, over all
programs. So the fetch is one flat loop over the tiles of all lines of a program, pipelined in DEPTH stages: the
compiler turns the loads into asynchronous copies to shared memory, four tiles = 8 KB ahead of their use, also across
lines. Four to eight programs saturate a link. (Tiles in registers were tried: in the machine code, moves that pass a
tile on to the next iteration wait for it to arrive, so that one was in flight, not four.)

Words are loaded with `.cg`: a line is read once per step, so it should not occupy the first-level cache, which the
concurrent product uses; asynchronous copies of 16 bytes do the same. The alternative `.cv` would fetch a line again for
each separately requested sector, and only protects from writes that never happen.

Every output is summed in one order: ROWS partial sums over the rows in steps of ROWS, then one tree. The order does not
depend on n_tb or on whether selection and fetch share a launch, so all variants give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.operations.channels import CHUNK
from runtime.backends.triton.carveout import leave_room
from runtime.backends.triton.kernels.select import (
    MODES,
    NUM_WARPS,
    RANDOM,
    Chosen,
    Selection,
    Source,
    check_input,
    select,
    select_chunk,
)
from runtime.backends.triton.kernels.union import fetch_union, room_of
from runtime.backends.triton.residual import LINE_WORDS, GpuResidual
from runtime.backends.triton.workspace import Workspace

ROWS = 16
"""Residual rows per tile: with 128 threads, 16 bytes each."""
DEPTH = 6
"""Pipeline stages of the fetch: one for the channels, which are the addresses, four for their words, one to add."""
_CHUNK, _LINE = tl.constexpr(CHUNK), tl.constexpr(LINE_WORDS)
_ALIGNMENT = 16
"""Alignment of parts of the workspace buffer in elements, so that every call compiles to the same kernel."""
_LOOKS = tl.constexpr(1 << 22)
"""Polls for the other programs: each takes almost a microsecond, so this is some seconds."""
STOPS = {"debug": True, "sanitize_overflow": False}
"""Compiles the assertion of that into the kernel, without those that Triton would add by itself."""
_TWO_TO_23 = tl.constexpr(0x4B000000)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Launch options of compensation. All give the same bits."""

    n_tb: int
    """Programs that fetch a row; programs beyond the number of 128-byte lines are idle in the fetch."""
    fused: bool
    """Whether one cooperative launch does everything, for one row; otherwise one launch selects and one fetches. Under
    the interpreter, which runs programs one after another, only with n_tb = 1."""
    copied: torch.Tensor | None = None
    """int32, memory on the device in which several rows share what they fetch, where it suffices
    (`runtime.backends.triton.kernels.union`); None: each fetches for itself."""


class Residual(NamedTuple):
    """The tensors of a `GpuResidual`."""

    codes: Any
    """`GpuResidual.codes`."""
    scales: Any
    """`GpuResidual.scales`."""


class Output(NamedTuple):
    """Destination of a compensation; in a kernel, of one row."""

    out: Any
    """float32 [M, N], contiguous; overwritten."""
    base: Any = None
    """float32 [M, N], contiguous, added to the result; may be `out` itself. None: nothing."""


class Fetch(NamedTuple):
    """Compile-time parameters of the kernels."""

    MODE: int = 0
    """Number of the selector, if one launch does everything."""
    BITS: int = 4
    """Bits of a residual."""
    ROWS: int = ROWS
    """See the module's docstring, as the next."""
    DEPTH: int = DEPTH


@triton.jit
def load_rows(chosen, tile, k, ROWS: tl.constexpr):
    """Channels int32 [ROWS], -1 where there is none, and activations float32 [ROWS] of a tile of the chosen channels.

    Other programs of the same launch may have written them just before. The first-level cache is not kept coherent
    between multiprocessors, so `.cg` asks to read past it. As asynchronous copies of 4 bytes these loads go through it
    all the same, and are right because the acquire of `_wait_for_all` empties it and nothing reads the buffers earlier.
    """
    places = tile * ROWS + tl.arange(0, ROWS)
    inside = places < k
    channels = tl.load(chosen.channels + places, mask=inside, other=-1, cache_modifier=".cg")
    return channels, tl.load(chosen.x + places, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def load_words(codes_ptr, channels, line, lines):
    """One line of each row of a tile, int32 [ROWS, 32, 1]; nothing is fetched for channel -1.

    The axis of length 1 is where the values of a word will lie: so the compiler keeps all of a word's values in the
    thread that loaded it, and moves nothing between threads until a line's sum is complete.
    """
    rows = (codes_ptr + (channels.to(tl.int64) * lines + line) * _LINE)[:, None, None]
    inside = (channels >= 0)[:, None, None]
    return tl.load(rows + tl.arange(0, _LINE)[None, :, None], mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def unpack_residuals(words, BITS: tl.constexpr):
    """Words [rows, n, 1] -> the values they hold, float32 [rows, n, 32 / BITS], before the output channel's scale.

    A code goes into the low bits of the float 2^23, from which 2^23 and the codes' offset are then subtracted: exact,
    and without the slow conversion of integers.
    """
    fields = words >> (BITS * tl.arange(0, 32 // BITS))[None, None, :]
    if BITS == 16:
        values = (fields & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        codes = (fields & ((1 << BITS) - 1)) | _TWO_TO_23
        values = codes.to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))
    return values


@triton.jit
def _write_line(total, scales_ptr, output, line, N, BITS: tl.constexpr):
    """Scale the sums of one line, float32 [32, 32 / BITS], add them to the base and write them."""
    WIDTH: tl.constexpr = _LINE * (32 // BITS)
    offs_n = line * WIDTH + tl.arange(0, WIDTH)
    mask_n = offs_n < N
    sums = tl.reshape(total, [WIDTH])
    if scales_ptr is not None:
        sums *= tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if output.base is not None:
        sums += tl.load(output.base + offs_n, mask=mask_n, other=0.0)
    tl.store(output.out + offs_n, sums, mask=mask_n)


@triton.jit
def _fetch_rows(chosen, residual, output, k, N, lines, fetch: tl.constexpr):
    """This program's lines of one row of x: out [N] = base + sum of the chosen activations times residual rows.

    One flat loop over the tiles of all its lines: a line's first tile does not wait for the end of the line before.
    """
    BITS: tl.constexpr = fetch.BITS
    ROWS: tl.constexpr = fetch.ROWS
    DEPTH: tl.constexpr = fetch.DEPTH
    share = tl.cdiv(lines, tl.num_programs(0))
    first = tl.program_id(0) * share
    tiles = tl.cdiv(k, ROWS)
    total = tiles * tl.maximum(tl.minimum(share, lines - first), 0)
    sums = tl.zeros([ROWS, _LINE, 32 // BITS], tl.float32)
    for step in tl.range(0, total, num_stages=DEPTH):
        tile = step % tiles
        line = first + step // tiles
        channels, x = load_rows(chosen, tile, k, ROWS)
        words = load_words(residual.codes, channels, line, lines)
        sums += unpack_residuals(words, BITS) * x[:, None, None]
        if tile == tiles - 1:
            _write_line(tl.sum(sums, axis=0), residual.scales, output, line, N, BITS)
            sums = tl.zeros([ROWS, _LINE, 32 // BITS], tl.float32)


@triton.jit
def _wait_for_all(counters_ptr):
    """Grid barrier: wait for every program of the launch. counters: int32 [2], arrived and departed programs.

    What this program wrote is ordered before its arrival: the block's own barrier puts all its threads' writes before
    the one thread that counts, and that thread's release makes them visible to the whole GPU. The wait ends with an
    acquire in that same thread, which also empties the multiprocessor's first-level cache, and the block's barrier
    passes that on to the other threads; so what is read after it is what all programs wrote. No compiler moves those
    reads up: to all of them, atomics and barriers write memory. Cooperative launch guarantees that all programs run at
    the same time, so the wait ends. Should it not, because counters were left wrong, a program gives up after seconds
    and stops the launch with a message: a device that hangs could say nothing.
    """
    programs = tl.num_programs(0)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") + 1
    looks = 0
    while (arrived < programs) & (looks < _LOOKS):
        arrived = tl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu")
        looks += 1
    tl.device_assert(arrived >= programs, "compensation waits for thread blocks that never arrived")
    tl.debug_barrier()


@triton.jit
def _leave(counters_ptr):
    """Reset both counters once every program has passed the barrier.

    The last program to leave does it: no other touches the counters any more, and the next launch on the stream starts
    after this one. Nothing of that needs the CPU, so a captured graph replays it.
    """
    left = tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") + 1
    if left == tl.num_programs(0):
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


@triton.jit(do_not_specialize=["k", "N", "lines"])
def _fetch_kernel(chosen, residual, output, k, N, lines, fetch: tl.constexpr):
    """Program (p, m) of n_tb x M writes its lines of row m. codes [K, lines * 32], chosen [M, k], out [M, N]."""
    row = tl.program_id(1).to(tl.int64)
    chosen = Chosen(chosen.channels + row * k, chosen.x + row * k, chosen.flag)
    if output.base is None:
        output = Output(output.out + row * N, output.base)
    else:
        output = Output(output.out + row * N, output.base + row * N)
    _fetch_rows(chosen, residual, output, k, N, lines, fetch)


@triton.jit(do_not_specialize=["k", "k_chunk", "stream", "N", "lines"])
def _compensate_kernel(
    source, chosen, search, residual, output, counters_ptr, k, k_chunk, stream, N, lines, fetch: tl.constexpr
):
    """Selection, barrier between all n_tb programs, fetch and product of one row. x [K], chosen [k].

    Twelve parameters: five of them are numbers that must not each make a kernel of their own, which can't be told so
    inside a tuple.
    """
    position = tl.full([], 0, tl.int32)
    if fetch.MODE == RANDOM:
        position = tl.load(source.positions)
    for chunk in range(tl.program_id(0), tl.cdiv(search.K, _CHUNK), tl.num_programs(0)):
        select_chunk(source, chosen, search, chunk, k_chunk, stream, position, fetch.MODE)
    _wait_for_all(counters_ptr)
    _fetch_rows(chosen, residual, output, k, N, lines, fetch)
    _leave(counters_ptr)


def compensate(
    x: torch.Tensor,
    selection: Selection,
    residual: GpuResidual,
    output: Output,
    config: LaunchConfig,
    workspace: Workspace,
    *,
    flag: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Select channels and write out = (base or 0) + the sum over them of x[c] times their residual rows.

    Never waits for the device, so it can be captured in a graph. Concurrent calls on two streams need separate
    workspaces. All launch options give the same bits.

    Args:
        x: float16 [M, K], contiguous, the layer's input; M = 1 if fused.
        selection: Channel selection.
        residual: The layer's residuals.
        output: Destination.
        config: Launch options.
        workspace: Provides the buffers of chosen channels and activations, and the barrier's counters.
        flag: int32 [1]; set to 1 if x contains NaN or infinity, otherwise unchanged. None: not checked.
        positions: int32 [M], position of every row in its sequence, for the random selector.

    Raises:
        ValueError: inconsistent operands.

    Source: QDEC §4.3, Fig. 10.
    """
    check_input(x, selection, positions)
    _check(x, selection, residual, output, config)
    rows, k, copied = x.shape[0], selection.k, config.copied
    places = triton.cdiv(rows * k, _ALIGNMENT) * _ALIGNMENT
    buffer = workspace.scratch(2 * places + 1, torch.int32)
    indices, values = buffer[: rows * k], buffer[places : places + rows * k].view(torch.float32)
    flag = buffer[2 * places :] if flag is None else flag
    codes, sizes = Residual(residual.codes, residual.scales), (residual.shape[0], residual.lines)
    if config.fused:
        launched = _compensate_kernel[(config.n_tb,)](
            Source(x, selection.channels, positions), Chosen(indices, values, flag), selection.search, codes, output,
            workspace.counters(2), k, selection.k_chunk, selection.stream, *sizes,
            fetch=Fetch(MODE=MODES[selection.mode], BITS=residual.bits), num_warps=NUM_WARPS,
            launch_cooperative_grid=True, **STOPS,
        )  # fmt: skip
        leave_room(launched, x.device, "compensation")
        return
    select(x, selection, indices.view(rows, k), values.view(rows, k), flag, positions=positions)
    shared = rows > 1 and copied is not None and selection.chunks * room_of(selection, rows) * residual.codes.shape[1]
    if shared and copied is not None and shared <= copied.numel():
        there = copied[:shared].view(-1, residual.codes.shape[1])
        fetch_union(indices.view(rows, k), selection, residual, there, workspace)
        codes = Residual(there, residual.scales)
    launched = _fetch_kernel[(config.n_tb, rows)](
        Chosen(indices, values, None), codes, output, k, *sizes, fetch=Fetch(BITS=residual.bits), num_warps=NUM_WARPS
    )
    leave_room(launched, x.device, "compensation")


def _check(x: torch.Tensor, selection: Selection, residual: GpuResidual, output: Output, config: LaunchConfig) -> None:
    rows, N = x.shape[0], residual.shape[0]
    if residual.shape[1] != selection.width:
        raise ValueError(f"the selection is over {selection.width} channels, the residuals over {residual.shape[1]}")
    for name, tensor in (("out", output.out), ("base", output.base)):
        if tensor is not None and (
            tensor.shape != (rows, N) or tensor.dtype != torch.float32 or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous float32 [{rows}, {N}], not {tensor.dtype} {list(tensor.shape)}"
            )
    if config.n_tb < 1:
        raise ValueError(f"n_tb is {config.n_tb}; at least one program has to fetch")
    if config.fused and rows != 1:
        raise ValueError(f"one launch compensates one row, not {rows}; select and fetch in two launches")
    if config.fused and config.n_tb > 1 and x.device.type == "cpu":
        raise ValueError(f"the interpreter runs one program after another: {config.n_tb} can't wait for each other")
