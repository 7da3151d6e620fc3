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
depend on n_tb or on whether selection and fetch share a launch, with each other or with the product, so all variants
give the same bits. The tree follows from the number of warps, which is the same in all of them.

Salient channels of neighbouring tokens are largely the same, so several rows fetch the *union* of what they chose: a
program per chunk of 1024 channels marks what the rows chose and numbers it, a few programs for each chunk copy these
residual rows to the device, and every row is compensated from the copies, by the same sums in the same order as from
the host's memory. So a batch has the bits that each of its rows has alone.

The residuals of a block's experts lie one behind the other, and a kernel finds an expert's by its number, which it
reads on the device. At `gate_up` all experts of a row share its channels, at `down` each has its own, and what they add
is summed up in the order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.operations.channels import CHUNK
from runtime.backends.triton.kernels.codes import Form
from runtime.backends.triton.kernels.experts import Choice
from runtime.backends.triton.kernels.gemv import WARPS, Product, write_part
from runtime.backends.triton.kernels.gemv import options as product_options
from runtime.backends.triton.kernels.select import (
    MODES,
    NUM_WARPS,
    RANDOM,
    Chosen,
    Search,
    Selection,
    Source,
    check_input,
    select,
    select_chunk,
)
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.residual import LINE_WORDS, GpuResidual
from runtime.backends.triton.sizes import BYTE
from runtime.backends.triton.workspace import Workspace, capability, leave_room

ROWS = 16
"""Residual rows per tile: 16 bytes for each of 128 threads, or twice for each of 64."""
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
COPY_PROGRAMS = 16
"""Programs that copy, over all chunks: with 4 KiB in flight each, they saturate a link."""
COPY_WORDS = 256
"""Words of a row per program and iteration."""
COPY_DEPTH = 4
"""Pipeline stages of the copy."""
UNION_WARPS, COPY_WARPS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Launch options of compensation. All give the same bits."""

    n_tb: int
    """Programs that fetch a row; programs beyond the number of 128-byte lines are idle in the fetch."""
    fused: bool
    """Whether one launch does everything, for one row; otherwise one launch selects and one fetches. Under
    the interpreter, which runs programs one after another, only with n_tb = 1."""
    product: Product | None = None
    """The product with the same row, if it is part of that launch."""
    copied: torch.Tensor | None = None
    """int32, memory on the device in which several rows share what they fetch, where it suffices
    (`runtime.backends.triton.kernels.compensate`); None: each fetches for itself."""


class Residual(NamedTuple):
    """The tensors of a `GpuResidual`."""

    codes: Any
    scales: Any


class Output(NamedTuple):
    """Destination of a compensation; in a kernel, of one row."""

    out: Any  # float32 [M, N], contiguous; overwritten
    base: Any = None  # float32 [M, N], contiguous, added to the result; may be `out` itself. None: nothing.


class Row(NamedTuple):
    """A row, and what compensates it."""

    source: Source
    chosen: Chosen
    search: Search
    residual: Residual
    output: Output
    counters: Any  # int32 [2], of `_wait_for_all` and `_leave`


class Fetch(NamedTuple):
    """Compile-time parameters of the kernels."""

    MODE: int = 0  # Number of the selector, if one launch does everything
    BITS: int = 4
    ROWS: int = ROWS  # See the module's docstring, as the next
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
def _fetch_rows(chosen, residual, output, k, N, program, programs, fetch: tl.constexpr):
    """This program's lines of one row of x: out [N] = base + sum of the chosen activations times residual rows.

    One flat loop over the tiles of all its lines: a line's first tile does not wait for the end of the line before.
    """
    BITS: tl.constexpr = fetch.BITS
    ROWS: tl.constexpr = fetch.ROWS
    DEPTH: tl.constexpr = fetch.DEPTH
    lines = tl.cdiv(N, _LINE * (32 // BITS))
    share = tl.cdiv(lines, programs)
    first = program * share
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
def _wait_for_all(counters_ptr, programs):
    """Barrier between the first programs of a grid, or all of them. counters: int32 [2], arrived and departed programs.

    What this program wrote is ordered before its arrival: the block's own barrier puts all its threads' writes before
    the one thread that counts, and that thread's release makes them visible to the whole GPU. The wait ends with an
    acquire in that same thread, which also empties the multiprocessor's first-level cache, and the block's barrier
    passes that on to the other threads; so what is read after it is what all programs wrote. No compiler moves those
    reads up: to all of them, atomics and barriers write memory. Cooperative launch guarantees that all programs run at
    the same time, so the wait ends; for others see `_compensated_kernel`. Should it not, because counters were left
    wrong, a program gives up after seconds and stops the launch with a message: a device that hangs could say nothing.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") + 1
    looks = 0
    while (arrived < programs) & (looks < _LOOKS):
        arrived = tl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu")
        looks += 1
    tl.device_assert(arrived >= programs, "compensation waits for thread blocks that never arrived")
    tl.debug_barrier()


@triton.jit
def _leave(counters_ptr, programs):
    """Reset both counters once every program has passed the barrier.

    The last program to leave does it: no other touches the counters any more, and the next launch on the stream starts
    after this one. Nothing of that needs the CPU, so a captured graph replays it.
    """
    left = tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") + 1
    if left == programs:
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


@triton.jit(do_not_specialize=["k", "N"])
def _fetch_kernel(chosen, residual, output, k, N, fetch: tl.constexpr):
    """Program (p, m) of n_tb x M writes its lines of row m. codes [K, lines * 32], chosen [M, k], out [M, N]."""
    row = tl.program_id(1).to(tl.int64)
    chosen = Chosen(chosen.channels + row * k, chosen.x + row * k, chosen.flag)
    if output.base is None:
        output = Output(output.out + row * N, output.base)
    else:
        output = Output(output.out + row * N, output.base + row * N)
    _fetch_rows(chosen, residual, output, k, N, tl.program_id(0), tl.num_programs(0), fetch)


@triton.jit
def _compensate_row(row, k_chunk, stream, N, program, programs, fetch: tl.constexpr):
    """Selection, barrier between some programs, fetch and product of one `Row`: x [K], chosen [k]."""
    position = tl.full([], 0, tl.int32)
    if fetch.MODE == RANDOM:
        position = tl.load(row.source.positions)
    K = row.search.K
    for chunk in range(program, tl.cdiv(K, _CHUNK), programs):
        select_chunk(row.source, row.chosen, row.search, chunk, k_chunk, stream, position, fetch.MODE)
    _wait_for_all(row.counters, programs)
    k = K // _CHUNK * k_chunk + tl.cdiv(K % _CHUNK * k_chunk, _CHUNK)  # `total_budget`
    _fetch_rows(row.chosen, row.residual, row.output, k, N, program, programs, fetch)
    _leave(row.counters, programs)


@triton.jit(do_not_specialize=["k_chunk", "stream", "N"])
def _compensate_kernel(row, k_chunk, stream, N, fetch: tl.constexpr):
    """Program p of n_tb compensates a row's share."""
    _compensate_row(row, k_chunk, stream, N, tl.program_id(0), tl.num_programs(0), fetch)


@triton.jit(do_not_specialize=["biased", "split", "n_tb", "k_chunk", "stream"])
def _compensated_kernel(
    given, results, biased, split, row, n_tb, k_chunk, stream,
    form: tl.constexpr, tile: tl.constexpr, fetch: tl.constexpr,
):  # fmt: skip
    """Program p < n_tb compensates a row's share; those behind multiply, as programs (i, j) of `gemv` do.

    The launch is not cooperative, as it has more programs than find room at once. Whoever multiplies waits for nobody
    and ends. So whatever order a card begins programs in, all n_tb find a place, and the wait for them ends: those that
    wait hold n_tb - 1 places at most, of at least four times as many as there are multiprocessors.
    """
    program = tl.program_id(0)
    if program < n_tb:
        _compensate_row(row, k_chunk, stream, given.matrix.N, program, n_tb, fetch)
    else:
        across = tl.cdiv(given.matrix.N, tile.BLOCK_N)
        place = program - n_tb
        write_part(given, results, biased, place % across, place // across, split, form, tile)


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
    indices, values, spare = _room_for(rows, k, workspace)
    flag = spare if flag is None else flag
    codes, N = Residual(residual.codes, residual.scales), residual.shape[0]
    if config.fused:
        source, chosen = Source(x, selection.channels, positions), Chosen(indices, values, flag)
        row = Row(source, chosen, selection.search, codes, output, workspace.counters(2))
        fetch = Fetch(MODE=MODES[selection.mode], BITS=residual.bits)
        _launch(row, (selection.k_chunk, selection.stream), N, config, fetch)
        return
    select(x, selection, indices, values, flag, positions=positions)
    shared = rows > 1 and copied is not None and selection.chunks * room_of(selection, rows) * residual.codes.shape[1]
    if shared and copied is not None and shared <= copied.numel():
        there = copied[:shared].view(-1, residual.codes.shape[1])
        fetch_union(indices, selection, residual, there, workspace)
        codes = Residual(there, residual.scales)
    launched = _fetch_kernel[(config.n_tb, rows)](
        Chosen(indices, values, None), codes, output, k, N, fetch=Fetch(BITS=residual.bits), num_warps=WARPS
    )
    leave_room(launched, x.device, "compensation")


def in_one(weight: GpuLinear, residual: GpuResidual) -> bool:
    """Whether one launch multiplies a row and compensates it.

    By compiled registers: where as many programs find room as of the product alone (`gemv.resident`). Two launches on
    two streams are left to residuals of 2 bits and to codebooks, and to what `gemv` does not multiply.
    """
    return weight.bits < BYTE and weight.kind != "codebook" and residual.bits > 2


def options(form: Form, major: int) -> dict[str, int]:
    """Further options of the compiler for a product with its compensation; see `gemv.options`."""
    if form.KIND == "uniform" and form.BITS == 3 and not form.TAIL:  # 168 would spill 8 to 48 bytes
        return {"maxnreg": 255} if major == 10 else {}
    if form.KIND == "trellis" and form.BITS < 4:  # from sm_100 on it stops at 168 by itself, and spills if told to
        return {"maxnreg": 168} if major < 10 else {}
    return product_options(1, form, major)


def _launch(row: Row, select_by: tuple[int, int], N: int, config: LaunchConfig, fetch: Fetch) -> None:
    """Compensate a row in one launch, beside its product or alone; `select_by`: k_chunk, and the random stream."""
    device = row.output.out.device
    if config.product is None:
        launched = _compensate_kernel[(config.n_tb,)](
            row, *select_by, N, fetch=fetch, num_warps=WARPS, launch_cooperative_grid=True, **STOPS
        )
        leave_room(launched, device, "compensation")
        return
    given, results, biased, across, split, form, tile, _ = config.product
    launched = _compensated_kernel[(config.n_tb + across * split,)](
        given._replace(M=None), results, biased, split, row, config.n_tb, *select_by,
        form=form, tile=tile, fetch=fetch, num_warps=WARPS, num_stages=1, **options(form, capability(device)), **STOPS,
    )  # fmt: skip
    leave_room(launched, device, "both")


def _room_for(rows: int, k: int, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channels int32 [rows, k] and activations float32 [rows, k] that rows choose, and a flag int32 [1]."""
    places = triton.cdiv(rows * k, _ALIGNMENT) * _ALIGNMENT
    buffer = workspace.scratch(2 * places + 1, torch.int32)
    indices, values = (buffer[at : at + rows * k].view(rows, k) for at in (0, places))
    return indices, values.view(torch.float32), buffer[2 * places :]


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


@triton.jit(do_not_specialize=["M", "K", "k", "k_chunk", "room"])
def _union_kernel(chosen_ptr, places_ptr, channels_ptr, counts_ptr, M, K, k, k_chunk, room):
    """Program c lists the channels that rows chose in chunk c, and replaces them by their places in the list.

    chosen [M, k]; places [chunks * 1024], scratch; channels [chunks, room] and counts [chunks], the list. Barriers
    order what threads of this one block write and read, past the first-level cache.
    """
    chunk = tl.program_id(0)
    start = chunk * _CHUNK
    width = tl.minimum(_CHUNK, K - start)
    take = tl.minimum(width, (k_chunk * width + _CHUNK - 1) // _CHUNK)
    offs = tl.arange(0, _CHUNK)
    chosen = chosen_ptr + chunk * k_chunk + offs
    places = places_ptr + start
    tl.store(places + offs, 0)
    tl.debug_barrier()
    for row in range(M):
        channels = tl.load(chosen + row * k, mask=offs < take, other=0)
        tl.store(places + channels - start, 1, mask=offs < take)
    tl.debug_barrier()
    there = tl.load(places + offs, cache_modifier=".cg")
    place = tl.cumsum(there) - there
    tl.store(channels_ptr + chunk * room + place, start + offs, mask=there > 0)
    tl.store(counts_ptr + chunk, tl.sum(there))
    tl.debug_barrier()
    tl.store(places + offs, chunk * room + place)
    tl.debug_barrier()
    for row in range(M):
        channels = tl.load(chosen + row * k, mask=offs < take, other=0)
        found = tl.load(places + channels - start, mask=offs < take, other=0, cache_modifier=".cg")
        tl.store(chosen + row * k, found, mask=offs < take)


@triton.jit(do_not_specialize=["room"])
def _copy_kernel(
    codes_ptr, channels_ptr, counts_ptr, copied_ptr, room, words, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):
    """Program (p, c) copies every p-th piece of chunk c's listed rows of codes [K, words], BLOCK words each.

    copied [chunks * room, words].
    """
    first = tl.program_id(1) * room
    tiles = tl.cdiv(words, BLOCK)
    pieces = tl.load(counts_ptr + tl.program_id(1)) * tiles
    for step in tl.range(tl.program_id(0), pieces, tl.num_programs(0), num_stages=DEPTH):
        row = first + step // tiles
        offs = step % tiles * BLOCK + tl.arange(0, BLOCK)
        source = codes_ptr + tl.load(channels_ptr + row).to(tl.int64) * words
        values = tl.load(source + offs, mask=offs < words, other=0, cache_modifier=".cg")
        tl.store(copied_ptr + row.to(tl.int64) * words + offs, values, mask=offs < words)


def room_of(selection: Selection, rows: int) -> int:
    """Most channels of a chunk that so many rows choose."""
    return min(CHUNK, rows * selection.k_chunk)


def fetch_union(
    chosen: torch.Tensor, selection: Selection, residual: GpuResidual, copied: torch.Tensor, workspace: Workspace
) -> None:
    """Copy the residual rows that any row of tokens chose, and say where each is; never waits for the device.

    `chosen` int32 [M, k] holds channels, and then the places of their rows in `copied`, int32 [chunks *
    room_of(selection, M), words], of which those are written where a channel is listed.
    """
    M, k = chosen.shape
    chunks, room, words = selection.chunks, room_of(selection, M), residual.codes.shape[1]
    assert copied.shape == (chunks * room, words)
    aligned = triton.cdiv(chunks, _ALIGNMENT) * _ALIGNMENT
    lists = workspace.lists(chunks * (CHUNK + room) + aligned)
    places, counts, channels = lists.split([chunks * CHUNK, aligned, chunks * room])
    _union_kernel[(chunks,)](
        chosen, places, channels, counts, M, selection.width, k, selection.k_chunk, room, num_warps=UNION_WARPS
    )
    _copy_kernel[(max(1, COPY_PROGRAMS // chunks), chunks)](
        residual.codes, channels, counts, copied, room, words, BLOCK=COPY_WORDS, DEPTH=COPY_DEPTH, num_warps=COPY_WARPS
    )


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

    x is float16 [M, K], the input of `gate_up`, or [P, K], that of `down`, a row for each pair of a row and one of its
    experts, int32 [M, each]; the output is float32 [P, N], or [M, N] where what a row's experts add is summed up.
    `rest` are the flag and the positions int32 [M] of `select`. Never waits for the device.

    Source: QDEC §4.3, Fig. 10.
    """
    (M, each), rows, k = chosen.shape, x.shape[0], selection.k
    summed = output.out.shape[0] == M and rows == M * each
    indices, values, _ = _room_for(rows, k, workspace)
    flag, positions = rest
    if selection.mode == "random" and summed:
        positions = positions.repeat_interleave(each)
    own = chosen.view(-1) if summed else None
    select(x, selection, indices, values, flag, positions=positions, experts=own)
    N, K = residual.shape
    launched = _fetch_experts_kernel[(n_tb, M)](
        Chosen(indices, values, None), Choice(chosen, each), Residual(residual.codes, residual.scales), output,
        k, N, K, residual.lines, SUMMED=summed, fetch=Fetch(BITS=residual.bits), num_warps=NUM_WARPS,
    )  # fmt: skip
    leave_room(launched, x.device, "compensation")
