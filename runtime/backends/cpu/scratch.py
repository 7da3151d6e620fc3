"""Scratch memory of a thread for an instruction: reserved by Python, laid out by compiled code."""

from __future__ import annotations

from typing import Final, NamedTuple

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.pages import HALF, TWO_PLANES, Cache, cache_of
from runtime.backends.cpu.data.records import BLOCK, ENTRY_BYTES, LANES, LINE, SPAN
from runtime.backends.cpu.machine.isa import VARIANT
from runtime.kv.kinds import LOW_RANK

MANY: Final = 4 * LANES if VARIANT.startswith("amx") else LANES
"""Tokens that `runtime.backends.cpu.units.w4a8.gemm_w4a8_many` handles at a time."""
TILE_BYTES: Final = 64 * MANY
"""Bytes at the start of the scratch: a tile's outputs of as many rows as are multiplied at a time. A tile's entries and
compensation's sums follow."""
BLOCK_TILES: Final = 192
"""Most tiles of 16 output channels that are compensated at a time."""
NOTE_BYTES: Final = 64 + 64 * BLOCK_TILES
"""Bytes of what a row is compensated with: eight words, and a block's sums between two groups of residual rows."""
SUMS: Final = 16
"""Sums of a slice of residuals, held in registers until it ends."""
FACTOR_BYTES: Final = 2 * 64
"""Bytes of the scales and shifts of a group of a panel."""
NOTED: Final = 256
"""Bytes of a query's block."""
GEAR_QUERIES: Final = 8
"""Queries side by side in GEAR's corrections."""


def scratch_of(instruction: op.Instruction) -> int:
    """Bytes of scratch per thread for an instruction."""
    match instruction:
        case op.Linear():
            return _linear_scratch(instruction)
        case op.Panel():
            return _panel_scratch(instruction)
        case op.Experts(sizes=sizes, total=total):
            entries = entries_bytes(sizes.blocks) if sizes.form == op.TRELLIS else 0
            return TILE_BYTES + max(NOTE_BYTES if total else 64 * SUMS, TILE_BYTES, entries)
        case op.Route(experts=experts):
            return 16 * experts
        case op.Select():
            return _select_scratch(instruction)
        case op.Attend(stored=stored):
            return _attend_scratch(instruction, cache_of(stored.cache))
        case op.Mix():
            return LINE
        case op.Streams(streams=streams):
            return LINE * (1 + streams) + 4 * streams * streams
        case op.DeltaRule():
            return recur_scratch(instruction.rows, instruction.key_dim)
        case op.Flush(page=of) | op.Restore(page=of):
            return _paging_scratch(cache_of(of.cache))
    return 0


def recur_scratch(rows: int, key_dim: int) -> int:
    """Bytes of scratch per thread for RECUR: two factors of each row, sixteen columns of a matrix, a vector."""
    return (8 * rows + LINE - 1) // LINE * LINE + 64 * key_dim + LINE


def _linear_scratch(linear: op.Linear) -> int:
    """Bytes of scratch per thread for the instruction."""
    weights = linear.weights
    entries = entries_bytes(weights.blocks) if weights.form in (op.CODEBOOK, op.TRELLIS, op.PER_TOKEN) else 0
    sums = NOTE_BYTES if linear.total else 64 * SUMS if linear.kept else 0
    return TILE_BYTES + max(entries, sums, TILE_BYTES if linear.whole.codes else 0)


def entries_bytes(blocks: int) -> int:
    """Bytes of a tile's entries, in whole loads of a tile register."""
    return (blocks + 1) // 2 * (2 * ENTRY_BYTES)


def _panel_scratch(panel: op.Panel) -> int:
    """Bytes of scratch per thread for the instruction."""
    weights = panel.weights
    return TILE_BYTES + (ENTRY_BYTES + LINE * BLOCK) * weights.blocks + FACTOR_BYTES * weights.groups


def _select_scratch(select: op.Select) -> int:
    """Bytes of scratch per thread for the instruction: keys of a row, if recall is measured."""
    return 8 * select.width if select.measure else 0


def _attend_scratch(attend: op.Attend, cache: Cache) -> int:
    """Bytes of scratch per thread for the instruction, with a cache of this description."""
    heads = attend.heads // attend.kv_heads
    return max(4 * SPAN * heads, _page_scratch(attend.rows * heads, cache) if cache["form"] != HALF else 0)


def _page_scratch(queries: int, cache: Cache) -> int:
    """Bytes of scratch for attention to pages.

    Args:
        queries: Most query heads of all rows at a time.
        cache: The cache's description.
    """
    padded, tokens = int(cache["padded"]), int(cache["tokens"])
    planes = 2 if cache["form"] in (8, TWO_PLANES) else 1
    room = gear_room(queries, padded, tokens) if cache["rank"] else 0
    beyond = 32 * tokens  # Corrections read eight queries' scores at once.
    return lay_out_pages(queries, padded, tokens, planes, room, 0).end + beyond


class PageAreas(NamedTuple):
    """The scratch of a run's pages, of n queries in P planes: addresses."""

    queries: int  # float32 [n, D padded]
    noted: int  # blocks of the queries, [n, NOTED] bytes
    room: int  # scratch of the corrections
    codes: int  # int8 [n, P, D padded], the queries
    scales: int  # float32 [max(D padded, T)], of keys or values
    zeros: int  # likewise
    scores: int  # float32 [n, P, T]; weights later
    weighed: int  # float32 [n, T], weights times scales
    weights: int  # int8 [n, P, T], the same
    products: int  # float32 [n, P, D padded], of weights and values
    end: int  # behind all


def lay_out_pages(queries: int, padded: int, tokens: int, planes: int, room: int, scratch: int) -> PageAreas:
    """The areas of a scratch.

    Args:
        queries: Query heads of all rows.
        padded: D padded to 32.
        tokens: T.
        planes: Of queries and weights.
        room: Bytes of the corrections.
        scratch: Its address.
    """
    noted = scratch + 4 * padded * queries
    corrections = noted + NOTED * queries
    codes = corrections + room
    scales = (codes + planes * padded * queries + 63) // 64 * 64
    zeros = scales + 4 * max(padded, tokens)
    scores = zeros + 4 * max(padded, tokens)
    weighed = scores + 4 * tokens * planes * queries
    weights = weighed + 4 * tokens * queries
    products = weights + planes * tokens * queries
    end = products + 4 * padded * planes * queries
    return PageAreas(scratch, noted, corrections, codes, scales, zeros, scores, weighed, weights, products, end)


def gear_room(queries: int, padded: int, tokens: int) -> int:
    """Bytes of scratch for the corrections; arguments as in `lay_out_pages`."""
    blocks = -(-queries // GEAR_QUERIES)
    return 4 * GEAR_QUERIES * (3 * blocks * padded + 2 * tokens) + 4 * LOW_RANK * (padded + tokens) + 256


def _paging_scratch(cache: Cache) -> int:
    """Bytes of scratch per thread for FLUSH and RESTORE, with a cache of this description."""
    outliers = max(cache["keys"]["kept"], cache["values"]["kept"])
    return int(lay_out_paging(cache["tokens"], cache["padded"], cache["rank"], outliers, 0).end)


class PagingAreas(NamedTuple):
    """The scratch of one head's keys, or values: addresses."""

    x: int  # float32 [T, D padded] or [D padded, T]: the numbers
    lost: int  # the same: quantization errors
    turned: int  # its transpose
    codes: int  # bytes, likewise
    lower: int  # of the lower plane
    low: int  # float32 [n, 16], the numbers without the largest outliers
    high: int  # likewise without the least
    places: int  # int32 [outliers, R]
    a: int  # float32 [r, T]
    b: int  # float32 [r, D padded]
    shares: int  # float32 [r]
    end: int  # behind all


def lay_out_paging(tokens: int, padded: int, rank: int, outliers: int, scratch: int) -> PagingAreas:
    """The areas of a scratch, for vectors with at most this many outliers."""
    size, longest = tokens * padded, max(tokens, padded)
    lost = scratch + 4 * size
    turned = lost + 4 * size
    codes = turned + 4 * size
    lower = codes + size
    low = lower + size
    high = low + 64 * longest
    places = high + 64 * longest
    a = places + 4 * outliers * longest
    b = a + 4 * rank * tokens
    shares = b + 4 * rank * padded
    return PagingAreas(scratch, lost, turned, codes, lower, low, high, places, a, b, shares, shares + 4 * rank)
