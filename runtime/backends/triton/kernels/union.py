"""Residual rows of several tokens, fetched over the link once: those of all channels that any of them chose.

Salient channels of neighbouring tokens are largely the same. A program per chunk of 1024 channels marks what the rows
chose and numbers it; a few programs for each chunk copy these residual rows to the device; then every row of tokens is
compensated from the copies, by the same sums in the same order as from the host's memory. So a batch has the bits that
each of its rows has alone, at the cost of the union's traffic instead of the sum's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.backends.operations.channels import CHUNK
from runtime.backends.triton.kernels.select import Selection
from runtime.backends.triton.residual import GpuResidual
from runtime.backends.triton.workspace import Workspace

PROGRAMS = 16
"""Programs that copy, over all chunks: with 4 KiB in flight each, they saturate a link."""
WORDS = 256
"""Words of a row per program and iteration."""
DEPTH = 4
"""Pipeline stages of the copy."""
_ALIGNMENT = 16
"""Alignment of lists in words, so that every call compiles to the same kernel."""
WARPS, COPY_WARPS = 4, 2
"""Warps of a program."""
_CHUNK = tl.constexpr(CHUNK)


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

    Args:
        chosen: int32 [M, k], channels; overwritten with the places of their rows in `copied`.
        selection: The selection that chose them.
        residual: The layer's residuals.
        copied: int32 [chunks * room_of(selection, M), words], written where a channel is listed.
        workspace: Of the current stream.
    """
    M, k = chosen.shape
    chunks, room, words = selection.chunks, room_of(selection, M), residual.codes.shape[1]
    assert copied.shape == (chunks * room, words)
    aligned = triton.cdiv(chunks, _ALIGNMENT) * _ALIGNMENT
    lists = workspace.lists(chunks * (CHUNK + room) + aligned)
    places, counts, channels = lists.split([chunks * CHUNK, aligned, chunks * room])
    _union_kernel[(chunks,)](
        chosen, places, channels, counts, M, selection.width, k, selection.k_chunk, room, num_warps=WARPS
    )
    _copy_kernel[(max(1, PROGRAMS // chunks), chunks)](
        residual.codes, channels, counts, copied, room, words, BLOCK=WORDS, DEPTH=DEPTH, num_warps=COPY_WARPS
    )
