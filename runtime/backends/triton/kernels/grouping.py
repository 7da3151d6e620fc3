"""Rows of a prompt grouped by expert on the GPU, so that a program multiplies rows that share an expert's matrix.

A row and one of its experts are a *pair*, numbered row by row. Pairs are ordered by their experts' numbers, and cut
into blocks of one expert each; how many blocks there are is only known on the device, so a launch has a program for as
many as there could be, and those of empty blocks do nothing. One program an expert: each counts everybody's pairs by
itself, so no program waits for another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_P = 1024
"""Pairs that a program reads at a time."""
WARPS = 4
"""Warps of a program."""


class Groups(NamedTuple):
    """A step's pairs, grouped."""

    order: Any
    """int32 [P], the pairs by expert."""
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
    """Group the pairs of a step; never waits for the device.

    Args:
        chosen: int32 [M, read], every row's experts.
        experts: Experts of the block.
        groups: Overwritten; `blocks` has room for `most_blocks`.
        block_m: Pairs of a block.
    """
    pairs = chosen.numel()
    most = groups.blocks.shape[1]
    assert groups.order.numel() == pairs
    assert most == most_blocks(pairs, experts, block_m)
    block_e = max(16, triton.next_power_of_2(experts))
    _group_kernel[(experts,)](
        chosen, groups, pairs, most, experts, BLOCK_E=block_e, BLOCK_M=block_m, BLOCK_P=BLOCK_P, num_warps=WARPS
    )
