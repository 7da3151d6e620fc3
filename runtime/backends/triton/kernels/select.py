"""Selection of salient channels on the GPU: one program for each chunk of 1024 channels of each row.

Every selector is reduced to an integer `order`, smallest first: the bucket (5 bits), the difference of a magnitude to
the largest half (15 bits), or that of a random key to the largest (53 bits). A binary search with one step per bit,
each a count over the chunk, finds the order up to which there are enough channels. A prefix sum then gives every chosen
channel its position, so that indices ascend and the order that overflows contributes its lowest channels. The result
equals that of `runtime.backends.operations.compensation`, with the same float32 arithmetic, for any number of programs.

A program keeps its chunk in registers and only writes the chosen channels. NaN and infinity set a flag; such a channel
has an order like any other, so a damaged activation never causes reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from models.packed import PackedLinear
from runtime.backends.decoder import Selector
from runtime.backends.operations.channels import BUCKETS, CHUNK, HALF, buckets, static_channels, total_budget

APPROX, EXACT, STATIC, RANDOM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MODES: dict[Selector, int] = {"approx": 0, "exact": 1, "static": 2, "random": 3}
"""The number of each selector in the kernels."""
_CHUNK, _BUCKETS, _HALF = tl.constexpr(CHUNK), tl.constexpr(BUCKETS), tl.constexpr(HALF)
_INFINITY = tl.constexpr(0x7C00)
_ORDER_BITS = tl.constexpr((5, 15, 0, 53))
NUM_WARPS = 4
"""Warps of a program: 8 channels of a chunk for each of its 128 threads."""


class Source(NamedTuple):
    """Input of a selection, as one kernel argument; in a kernel, of one row."""

    x: Any  # float16 [M, K], the layer's input
    table: Any  # `Selection.channels`, or None
    positions: Any  # int32 [M], position of every row in its sequence, for the random selector; or None
    experts: Any = None
    """int32 [M], the expert whose channels each row takes from the table, which then is [E, k]; None: all the same."""


class Chosen(NamedTuple):
    """Output of a selection and input of a fetch; in a kernel, of one row."""

    channels: Any  # int32 [M, k], ascending in each chunk
    x: Any  # float32 [M, k], their activations
    flag: Any  # int32 [1], set to 1 if x contains NaN or infinity; None for a fetch


class Search(NamedTuple):
    """Parameters shared by a layer's selections; see `Selection`."""

    K: Any
    b15: Any
    upper_scale: Any
    lower_scale: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Channel selection of one linear layer."""

    width: int  # K, input channels of the layer
    k_chunk: int  # Salient channels per 1024, in [1, 1024]; a layer with 0 is not compensated and has no Selection
    k: int  # Channels chosen in a row, `budget.total_budget(width, k_chunk)`
    mode: Selector = "approx"  # Which selector
    b15: float = 0.0  # See `budget.Buckets`, as the next two; approx only
    upper_scale: float = 0.0  # Buckets per unit from b15 up
    lower_scale: float = 0.0  # Buckets per unit below b15
    channels: torch.Tensor | None = None
    """int32 [k] on the device, ascending: the channels of the static selector, else None. [E, k] where experts have
    inputs of their own."""
    seed: int = 0  # `DecoderOptions.seed`, for the random selector; its low 64 bits count
    layer: int = 0  # Index of the layer in `ModelSpec.linear_names`, for the random selector

    def __post_init__(self) -> None:
        """Raise ValueError if the parameters are not consistent."""
        if self.mode not in MODES:
            raise ValueError(f"there is no selector {self.mode!r}; the selectors are {', '.join(MODES)}")
        if not 1 <= self.k_chunk <= CHUNK:
            raise ValueError(f"k_chunk is {self.k_chunk}; a selection takes 1 to {CHUNK} channels of {CHUNK}")
        if self.k != total_budget(self.width, self.k_chunk):
            raise ValueError(
                f"k is {self.k}; at k_chunk {self.k_chunk}, {self.width} channels give "
                f"{total_budget(self.width, self.k_chunk)}"
            )
        if (self.mode == "static") != (self.channels is not None):
            raise ValueError("the static selector takes a table of channels, and no other does")

    @property
    def stream(self) -> int:
        """Initial state of the random selector's generator, before a row's position, as a signed integer; else 0."""
        if self.mode != "random":
            return 0
        state = _mix_number(_mix_number(self.seed) ^ self.layer)
        return (state + (1 << 63)) % (1 << 64) - (1 << 63)

    @property
    def search(self) -> Search:
        return Search(self.width, self.b15, self.upper_scale, self.lower_scale)

    @property
    def chunks(self) -> int:
        return -(-self.width // CHUNK)


def make_selection(
    packed: PackedLinear,
    *,
    k_chunk: int,
    mode: Selector = "approx",
    seed: int = 0,
    layer: int = 0,
    device: torch.device | str,
    experts: Sequence[PackedLinear] = (),
) -> Selection:
    """The selection of one stored linear layer, with the calibration's statistics.

    Of `experts`, the layer's among them, every row's is selected by that expert's own statistics. Raises ValueError if
    the layer has no statistics, or a number is out of range.
    """
    if packed.rank_maximum is None or packed.mean_square is None:
        raise ValueError(f"{packed.name} was stored without residuals, so there is nothing to select for")
    width = packed.shape[1]
    k = total_budget(width, k_chunk)
    edges = buckets(packed.rank_maximum, k) if k and mode == "approx" else None
    table = static_table(experts or (packed,), k_chunk) if mode == "static" else None
    return Selection(
        width=width,
        k_chunk=k_chunk,
        k=k,
        mode=mode,
        b15=edges.b15 if edges else 0.0,
        upper_scale=edges.upper_scale if edges else 0.0,
        lower_scale=edges.lower_scale if edges else 0.0,
        channels=None if table is None else (table if experts else table[0]).to(device),
        seed=seed,
        layer=layer,
    )


def static_table(packed: Sequence[PackedLinear], k_chunk: int) -> torch.Tensor:
    """The channels that the static selector takes in each of some layers, int32 [layers, k], ascending."""
    rows = []
    for each in packed:
        assert each.mean_square is not None
        rows.append(static_channels(np.asarray(each.mean_square), k_chunk))
    return torch.from_numpy(np.stack(rows))


def _mix_number(state: int) -> int:
    """`_mix` of a number's low 64 bits, on the host."""
    bits = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & bits
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & bits
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & bits
    return state ^ (state >> 31)


@triton.jit
def _mix(state):
    """The finalizer of splitmix64 on uint64, as in `runtime.backends.operations.channels`."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _order_of(x, channels, search, stream, position, MODE: tl.constexpr):
    """Position of every channel in the selector's order, smallest first; x float16 [CHUNK], channels int32 [CHUNK]."""
    magnitude_bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    if MODE == RANDOM:
        state = _mix(stream.to(tl.int64).to(tl.uint64, bitcast=True) ^ position.to(tl.uint64))
        key = _mix(state ^ channels.to(tl.uint64)) >> 11
        order = (1 << 53) - 1 - key.to(tl.int64)
    elif MODE == EXACT:
        order = 0x7FFF - magnitude_bits.to(tl.int32)
    else:
        # A bad value counts as 0 here: what NaN becomes as an integer is undefined.
        magnitude = tl.where(magnitude_bits < _INFINITY, tl.abs(x.to(tl.float32)), 0.0)
        above = tl.minimum(tl.maximum(tl.floor((magnitude - search.b15) * search.upper_scale), 0.0), _HALF - 1.0)
        below = tl.minimum(tl.maximum(tl.floor(magnitude * search.lower_scale), 0.0), _HALF - 1.0)
        order = tl.where(magnitude >= search.b15, _HALF - 1.0 - above, _BUCKETS - 1.0 - below).to(tl.int32)
    return order


@triton.jit
def _choose(order, take, BITS: tl.constexpr):
    """Which channels are the `take` first of the order, and the place of each among the chosen.

    `limit` is the largest order below which there are fewer than `take` channels: those are chosen, and of the channels
    at `limit` the lowest, as many as there is room for.
    """
    limit = tl.full([], 0, order.dtype)
    step = tl.full([], 1 << (BITS - 1), order.dtype)
    before = tl.full([], 0, tl.int32)
    for _ in range(BITS):
        below = tl.sum((order < limit + step).to(tl.int32))
        fewer = below < take
        limit = tl.where(fewer, limit + step, limit)
        before = tl.where(fewer, below, before)
        step = step >> 1
    room = take - before
    certain = (order < limit).to(tl.int32)
    equal = (order == limit).to(tl.int32)
    # One running count of both: at most 1024 certain channels in the low half, the equal ones in the high half.
    counted = tl.cumsum(certain + (equal << 16))
    certain_before = (counted & 0xFFFF) - certain
    equal_before = (counted >> 16) - equal
    chosen = (certain + equal * (equal_before < room).to(tl.int32)) > 0
    return chosen, certain_before + tl.minimum(equal_before, room)


@triton.jit
def select_chunk(source, chosen, search, chunk, k_chunk, stream, position, MODE: tl.constexpr):
    """Select in one chunk of one row: x [K], k chosen channels; a full chunk always gives k_chunk of them."""
    start = chunk * _CHUNK
    width = tl.minimum(_CHUNK, search.K - start)
    take = tl.minimum(width, (k_chunk * width + _CHUNK - 1) // _CHUNK)
    offs = tl.arange(0, _CHUNK)
    # Read one half a lane instead of eight: what follows then keeps one layout, where it would be moved through shared
    # memory for each of the scattered writes.
    channels = tl.max_contiguous(start + offs, 1)
    mask = channels < search.K
    x = tl.load(source.x + channels, mask=mask, other=0.0)
    bad = (x.to(tl.int16, bitcast=True) & 0x7FFF) >= _INFINITY
    tl.store(chosen.flag + tl.zeros_like(offs), 1, mask=bad)
    first = chunk * k_chunk
    if MODE == STATIC:
        kept = offs < take
        listed = tl.load(source.table + first + offs, mask=kept, other=0)
        value = tl.load(source.x + listed, mask=kept, other=0.0)
        tl.store(chosen.channels + first + offs, listed, mask=kept)
        tl.store(chosen.x + first + offs, value.to(tl.float32), mask=kept)
    else:
        order = _order_of(x, channels, search, stream, position, MODE)
        BITS: tl.constexpr = _ORDER_BITS[MODE]
        order = tl.where(mask, order, 1 << BITS)
        taken, place = _choose(order, take, BITS)
        tl.store(chosen.channels + first + place, channels, mask=taken)
        tl.store(chosen.x + first + place, x.to(tl.float32), mask=taken)


@triton.jit(do_not_specialize=["k", "k_chunk", "stream"])
def _select_kernel(source, chosen, search, k, k_chunk, stream, MODE: tl.constexpr):
    """Program (chunk, m) selects in one chunk of row m."""
    row = tl.program_id(1).to(tl.int64)
    position = tl.full([], 0, tl.int32)
    if MODE == RANDOM:
        position = tl.load(source.positions + row)
    table = source.table
    if source.experts is not None:
        table += tl.load(source.experts + row) * k
    source = Source(source.x + row * search.K, table, source.positions)
    chosen = Chosen(chosen.channels + row * k, chosen.x + row * k, chosen.flag)
    select_chunk(source, chosen, search, tl.program_id(0), k_chunk, stream, position, MODE)


def select(
    x: torch.Tensor,
    selection: Selection,
    indices: torch.Tensor,
    values: torch.Tensor,
    flag: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> None:
    """Choose the salient channels of every row; never waits for the device, so it can be captured in a graph.

    Args:
        x: float16 [M, K], contiguous, the layer's input.
        selection: How to choose.
        indices: int32 [M, k]; overwritten with the chosen channels, ascending.
        values: float32 [M, k]; overwritten with their activations.
        flag: int32 [1]; set to 1 if x contains NaN or infinity, otherwise unchanged. The reader raises
            `InvalidActivationError`.
        positions: int32 [M], position of every row in its sequence, for the random selector.
        experts: int32 [M], the expert of every row, for a static selector whose channels are [E, k].

    Raises:
        ValueError: inconsistent shapes or types, or no positions for the random selector.

    Source: QDEC §4.3, Fig. 8.
    """
    check_input(x, selection, positions)
    rows = x.shape[0]
    for name, tensor, dtype in (("indices", indices, torch.int32), ("values", values, torch.float32)):
        if tensor.shape != (rows, selection.k) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} [{rows}, {selection.k}], not {tensor.dtype} {list(tensor.shape)}"
            )
    each = selection.channels is not None and selection.channels.ndim > 1
    _select_kernel[(selection.chunks, rows)](
        Source(x, selection.channels, positions, experts if each else None),
        Chosen(indices, values, flag),
        selection.search,
        selection.k,
        selection.k_chunk,
        selection.stream,
        MODE=MODES[selection.mode],
        num_warps=NUM_WARPS,
    )


def check_input(x: torch.Tensor, selection: Selection, positions: torch.Tensor | None) -> None:
    """Raise ValueError unless x, and positions where they matter, are as `select` says."""
    if x.ndim != 2 or x.shape[1] != selection.width or x.dtype != torch.float16 or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float16 [M, {selection.width}], not {x.dtype} {list(x.shape)}")
    if selection.mode == "random" and (positions is None or positions.shape != x.shape[:1]):
        raise ValueError(f"the random selector needs the positions of all {x.shape[0]} rows, int32")


def recall(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Share of the chosen channels [M, k] that are among the k largest magnitudes of their whole row of x [M, K].

    Returns float32 [M] on the same device, not waited for; channels of equal magnitude count alike.

    Source: QDEC Fig. 15.
    """
    magnitude = x.abs()
    threshold = magnitude.topk(indices.shape[1], dim=1).values[:, -1:]
    return (magnitude.gather(1, indices.long()) >= threshold).float().mean(1)
