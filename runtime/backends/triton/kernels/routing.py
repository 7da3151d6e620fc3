"""The router of a mixture of experts on the GPU: logits, the experts that each row goes to, and their shares.

One launch: programs compute the logits of a few experts each, in float32, and the last of a row's to finish chooses.
The order of sums does not depend on which that is. The arithmetic is that of `models.routing`; of equal ranks the lower
number is chosen, and NaN ranks last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.spec import MixtureSpec
from runtime.backends.triton.kernels.activations import sigmoid
from runtime.backends.triton.sizes import SUMMED_ROWS
from runtime.backends.triton.workspace import Workspace

WARPS = 4
_LOWEST = tl.constexpr(-3e38)
"""Rank of NaN and -infinity: above that of an expert that is already chosen."""


class Form(NamedTuple):
    """Compile-time parameters of a router."""

    EXPERTS: int  # Experts to choose from
    CHOSEN: int  # Of these, those of a row
    SHARED: int  # Experts that every row goes to, numbered behind
    GATED: bool  # Whether these have the sigmoid of the last logit as their share
    SIGMOIDS: bool  # Whether scores are sigmoids, else a softmax
    NORMALIZED: bool  # Whether shares add up to 1 before they are scaled
    BLOCK_E: int  # Experts, rounded up to a power of two


class Tile(NamedTuple):
    """Compile-time parameters of a program."""

    BLOCK_M: int
    BLOCK_S: int  # Logits of each
    BLOCK_K: int  # Channels at a time


ONE = Tile(1, 4, 1024)
"""A program of a single row: 16 KiB of the router on their way."""
SEVERAL = Tile(16, 16, 64)
"""Of prompts, whose rows share what is read of the router."""


class RouterWeights(NamedTuple):
    """A router as a kernel argument; see `GpuRouter`."""

    weight: Any
    bias: Any
    correction: Any
    eps: Any


class Routed(NamedTuple):
    """Output of a router."""

    chosen: Any  # int32 [M, read], ascending; shared ones last
    shares: Any  # float32 [M, read]
    logits: Any  # float32 [M, scores]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRouter:
    """The router of one block."""

    mixture: MixtureSpec  # What it chooses from
    weight: torch.Tensor  # float32 [scores, C]
    bias: torch.Tensor | None  # float32 [scores], added to the logits; None: there is none
    correction: torch.Tensor | None  # float32 [experts], added to the scores for the choice; None: there is none
    eps: float | None = None
    """Epsilon of an RMSNorm of the rows, whose weight is already in `weight`; None: there is none."""

    @property
    def form(self) -> Form:
        of = self.mixture
        block = max(16, triton.next_power_of_2(of.experts))
        return Form(of.experts, of.chosen, of.shared, of.gated, of.scoring == "sigmoid", of.normalized, block)


@triton.jit
def _logits(x_ptr, weights, offs_m, offs_s, M, C, S, tile: tl.constexpr):
    """Logits of some rows without biases: float32 [BLOCK_M, BLOCK_S]. With an epsilon, rows pass an RMSNorm first."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_S: tl.constexpr = tile.BLOCK_S
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, C, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < C
        at = weights.weight + offs_s[:, None] * C + offs_k[None, :]
        w = tl.load(at, mask=(offs_s < S)[:, None] & mask_k[None, :], other=0.0)
        at = x_ptr + offs_m.to(tl.int64)[:, None] * C + offs_k[None, :]
        x = tl.load(at, mask=(offs_m < M)[:, None] & mask_k[None, :], other=0.0).to(tl.float32)
        if BLOCK_M == 1:
            acc += tl.sum(w * x, axis=1)[None, :]
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if weights.eps is not None:
            squares += tl.sum(x * x, axis=1)
    if weights.eps is not None:
        acc *= tl.rsqrt(squares / C + weights.eps)[:, None]
    return acc


@triton.jit
def _choose(logits, correction_ptr, form: tl.constexpr):
    """Choose experts for some rows.

    Args (tensors): float32 [BLOCK_M, BLOCK_E], the logits.

    Returns:
        Whether each is chosen, and its share before it is scaled, [BLOCK_M, BLOCK_E] both.
    """
    offs_e = tl.arange(0, form.BLOCK_E)[None, :]
    inside = offs_e < form.EXPERTS
    logits = tl.where(inside, logits, float("-inf"))
    if form.SIGMOIDS:
        scores = sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    ranks = logits
    if correction_ptr is not None:
        ranks = scores + tl.load(correction_ptr + offs_e, mask=inside, other=0.0)
    ranks = tl.where(ranks > _LOWEST, ranks, _LOWEST)
    ranks = tl.where(inside, ranks, float("-inf"))
    taken = tl.zeros_like(ranks) > 1.0
    for _ in range(form.CHOSEN):
        best = offs_e == tl.argmax(ranks, axis=1)[:, None]
        taken = taken | best
        ranks = tl.where(best, float("-inf"), ranks)
    if form.NORMALIZED:
        if not form.SIGMOIDS:
            highest = tl.max(tl.where(taken, logits, float("-inf")), axis=1)
            scores = tl.exp(logits - highest[:, None])
        scores = scores / tl.sum(tl.where(taken, scores, 0.0), axis=1)[:, None]
    return taken, scores


@triton.jit(do_not_specialize=["M", "C", "scale"])
def _route_kernel(x_ptr, weights, routed, counters_ptr, M, C, scale, form: tl.constexpr, tile: tl.constexpr):
    """Program (i, j): logits of block i for the rows of block j; the last of a block's rows chooses. x [M, C]."""
    S: tl.constexpr = form.EXPERTS + (1 if form.SHARED > 0 and form.GATED else 0)
    READ: tl.constexpr = form.CHOSEN + form.SHARED
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_E: tl.constexpr = form.BLOCK_E
    pid_s, pid_m = tl.program_id(0), tl.program_id(1)
    offs_s = pid_s * tile.BLOCK_S + tl.arange(0, tile.BLOCK_S)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    found = _logits(x_ptr, weights, offs_m, offs_s, M, C, S, tile)
    if weights.bias is not None:
        found += tl.load(weights.bias + offs_s, mask=offs_s < S, other=0.0)[None, :]
    own = routed.logits + offs_m[:, None] * S
    tl.store(own + offs_s[None, :], found, mask=mask_m & (offs_s < S)[None, :])
    tl.debug_barrier()  # all of the program's logits are written before its arrival is counted
    if tl.atomic_add(counters_ptr + pid_m, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters_ptr + pid_m, 0)
        offs_e = tl.arange(0, BLOCK_E)[None, :]
        # Past the first-level cache, which doesn't see what other multiprocessors write.
        logits = tl.load(own + offs_e, mask=mask_m & (offs_e < form.EXPERTS), other=0.0, cache_modifier=".cg")
        taken, shares = _choose(logits, weights.correction, form)
        place = offs_m[:, None] * READ + tl.cumsum(taken.to(tl.int32), axis=1) - 1
        numbers = tl.broadcast_to(offs_e, [BLOCK_M, BLOCK_E])
        tl.store(routed.chosen + place, numbers, mask=mask_m & taken)
        tl.store(routed.shares + place, shares * scale, mask=mask_m & taken)
        if form.SHARED > 0:
            share = tl.full([BLOCK_M, 1], 1.0, tl.float32)
            if form.GATED:
                share = sigmoid(tl.load(own + form.EXPERTS, mask=mask_m, other=0.0, cache_modifier=".cg"))
            behind = offs_m[:, None] * READ + form.CHOSEN
            for number in range(form.SHARED):
                tl.store(routed.chosen + behind + number, form.EXPERTS + number, mask=mask_m)
                tl.store(routed.shares + behind + number, share, mask=mask_m)


def route(x: torch.Tensor, router: GpuRouter, routed: Routed, workspace: Workspace) -> None:
    """Choose the experts of every row of x [M, C]; never waits for the device, so it can be captured in a graph."""
    (M, C), form = x.shape, router.form
    tile = ONE if M <= SUMMED_ROWS else SEVERAL
    grid = (triton.cdiv(router.weight.shape[0], tile.BLOCK_S), triton.cdiv(M, tile.BLOCK_M))
    weights = RouterWeights(router.weight, router.bias, router.correction, router.eps)
    _route_kernel[grid](
        x, weights, routed, workspace.counters(grid[1]), M, C, router.mixture.scale, form=form,
        tile=tile, num_warps=WARPS,
    )  # fmt: skip
