"""Units of SELECT instructions: salient channels of every chunk of a row, one unit for each selector.

In a step of one row SELECT has no turn of its own: the next product does not need the channels before it compensates,
so the thread with the product's first part chooses them (`choose`) and announces them in the instruction.

All write the chosen channels in ascending order, so that their residual rows are summed in the same order whichever way
they were found. Magnitudes are compared by their bits, which have the same order as the numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from runtime.backends.cpu.data.instructions import BESIDE, CHOSEN_IN, WIDTH, Border, Select
from runtime.backends.cpu.data.records import FAILED, PAIR_BYTES, TURN, Parameters
from runtime.backends.cpu.kernels.views import (
    counts_at,
    header_at,
    pair_at,
    parameters_at,
    rows_of,
    select_at,
    share_of,
)
from runtime.backends.cpu.machine.kernel import call_3, call_5, kernel, routine
from runtime.backends.cpu.machine.sync import number_of, read_word, write_word
from runtime.backends.cpu.machine.unit import Unit, compiled_unit, made_unit
from runtime.backends.cpu.machine.vector import (
    absolute,
    bytes_at_most,
    count_bits,
    fill,
    fill_from,
    fill_words,
    get_float,
    get_int,
    get_word,
    lanes_below,
    load_floats,
    lowest_bit,
    magnitude_bits,
    mul,
    set_float,
    set_int,
    set_word,
    stack_words_128,
    stack_words_1024,
    steps_down,
    store_bytes,
    sub,
    where_at_least,
)
from runtime.backends.operations.channels import BUCKETS, CHUNK, HALF

_INFINITY = 0x7F800000
_MANTISSA = (1 << 53) - 1
_LARGEST = np.float32(3.4028235e38)


class Chunk(NamedTuple):
    """A chunk of a row, and the number of channels to choose."""

    x: int  # address of the row, float32 [K]
    start: int  # first channel of the chunk
    width: int  # channels of the chunk, at most 1024
    k: int  # channels to choose, in [1, width]
    out: int  # address of int32 [k], the chosen channels


@kernel
def kth_largest(keys: int, count: int, k: int, bits: int) -> tuple[int, int]:
    """The k-th largest of `count` non-negative integer keys under 2^bits, by radix selection.

    Args:
        keys: Address of int64 [count].
        count: Number of keys.
        k: Rank, in [1, count].
        bits: Bits of a key.

    Returns:
        The key, and how many keys equal to it belong to the k largest.
    """
    counts = stack_words_128()  # int32 [256]
    prefix, known, wanted = 0, 0, k
    while known < bits:
        digit = min(8, bits - known)
        shift = bits - known - digit
        for bucket in range(256):
            set_int(counts + 4 * bucket, numba.int32(0))
        for i in range(count):
            key = get_word(keys + 8 * i)
            if known == 0 or (key >> (shift + digit)) == prefix:
                at = counts + 4 * ((key >> shift) & ((1 << digit) - 1))
                set_int(at, numba.int32(get_int(at) + 1))
        bucket = (1 << digit) - 1
        while get_int(counts + 4 * bucket) < wanted:
            wanted -= get_int(counts + 4 * bucket)
            bucket -= 1
        prefix = (prefix << digit) | bucket
        known += digit
    return prefix, wanted


@kernel
def select_exact(chunk: Chunk) -> bool:
    """The k largest |x| of a chunk; ties go to the lowest channel. False if it contains NaN or infinity."""
    keys = stack_words_1024()
    finite = True
    for i in range(chunk.width):
        key = magnitude_bits(chunk.x + 4 * (chunk.start + i))
        set_word(keys + 8 * i, key)
        finite = finite and key < _INFINITY
    _write_largest(keys, chunk, 31)
    return finite


@kernel
def _write_largest(keys: int, chunk: Chunk, bits: int) -> None:
    threshold, equal = kth_largest(keys, chunk.width, chunk.k, bits)
    taken = 0
    for i in range(chunk.width):
        key = get_word(keys + 8 * i)
        if key > threshold:
            set_int(chunk.out + 4 * taken, numba.int32(chunk.start + i))
            taken += 1
        elif key == threshold and equal > 0:
            equal -= 1
            set_int(chunk.out + 4 * taken, numba.int32(chunk.start + i))
            taken += 1


@kernel
def select_approx(chunk: Chunk, border: Border) -> bool:
    """Like `select_exact`, by 32 buckets; the overflowing bucket contributes its lowest channels.

    Source: QDEC §4.3, Fig. 8.
    """
    buckets = stack_words_128()  # int8 [1024], of whole vectors of 64
    start, width = chunk.start, chunk.width
    vectors = (width + 15) // 16
    finite = True
    uppers, lowers = fill(border.upper), fill(border.lower)
    borders = fill(border.b15)
    for v in range(vectors):
        value = absolute(load_floats(chunk.x + 4 * (start + 16 * v)))
        inside = min(16, width - 16 * v)
        ordinary = lanes_below(value, _LARGEST) | (0xFFFF << inside)
        finite = finite and ordinary & 0xFFFF == 0xFFFF
        above = steps_down(mul(sub(value, borders), uppers), numba.int32(HALF - 1))
        below = steps_down(mul(value, lowers), numba.int32(BUCKETS - 1))
        bucket = where_at_least(value, border.b15, above, below)
        store_bytes(buckets + 16 * v, fill_from(bucket, inside, numba.int32(BUCKETS)))
    for v in range(vectors, (width + 63) // 64 * 4):
        store_bytes(buckets + 16 * v, fill_words(numba.int32(BUCKETS)))
    _write_buckets(buckets, chunk)
    return finite


@kernel
def _write_buckets(buckets: int, chunk: Chunk) -> None:
    """Write the channels of the lowest buckets."""
    vectors, k = (chunk.width + 63) // 64, chunk.k
    # The first bucket up to which there are enough: five halvings instead of a histogram.
    low, high = 0, BUCKETS - 1
    while low < high:
        middle = (low + high) // 2
        if _count_up_to(buckets, vectors, middle) >= k:
            high = middle
        else:
            low = middle + 1
    room = k - (_count_up_to(buckets, vectors, low - 1) if low > 0 else 0)
    taken = 0
    for v in range(vectors):
        certain = bytes_at_most(buckets + 64 * v, numba.int32(low - 1))
        lanes = bytes_at_most(buckets + 64 * v, numba.int32(low))
        while lanes != 0:
            lane = lowest_bit(lanes)
            lanes &= lanes - 1
            if (certain >> lane) & 1 == 0:
                if room == 0:
                    continue
                room -= 1
            set_int(chunk.out + 4 * taken, numba.int32(chunk.start + 64 * v + lane))
            taken += 1


@kernel
def _count_up_to(buckets: int, vectors: int, limit: int) -> int:
    """Number of buckets, int8 [64 * vectors], that are <= limit."""
    total = 0
    for v in range(vectors):
        total += count_bits(bytes_at_most(buckets + 64 * v, numba.int32(limit)))
    return total


@kernel
def _mix(state: int) -> int:
    """The finalizer of splitmix64, as in `runtime.backends.operations.channels`."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@kernel
def select_random(seed: int, layer: int, position: int, chunk: Chunk) -> None:
    """Choose k channels of the chunk by a counter-based generator; the same as `channels.random_channels`."""
    keys = stack_words_1024()
    state = _mix(np.uint64(seed))
    state = _mix(state ^ np.uint64(layer))
    state = _mix(state ^ np.uint64(position))
    for i in range(chunk.width):
        set_word(keys + 8 * i, np.int64(_mix(state ^ np.uint64(chunk.start + i)) >> np.uint64(11)) & _MANTISSA)
    _write_largest(keys, chunk, 53)


@kernel
def count_hits(x: int, width: int, chosen: int, k: int, keys: int) -> int:
    """Number of the k chosen channels that are among the k largest |x| of the whole row (ties count).

    Args:
        x: Address of the row, float32 [K].
        width: K.
        chosen: Address of int32 [k].
        k: Chosen channels.
        keys: Address of scratch, int64 [K].
    """
    for i in range(width):
        set_word(keys + 8 * i, magnitude_bits(x + 4 * i))
    threshold, _ = kth_largest(keys, width, k, 31)
    hits = 0
    for i in range(k):
        if get_word(keys + 8 * numba.int64(get_int(chosen + 4 * i))) >= threshold:
            hits += 1
    return hits


_FAILED = 8 * FAILED


@routine
def _approx(select: Select, _step: Parameters, _row: int, _expert: int, chunk: Chunk) -> bool:
    return select_approx(chunk, select.border)


@routine
def _exact(_select: Select, _step: Parameters, _row: int, _expert: int, chunk: Chunk) -> bool:
    return select_exact(chunk)


@routine
def _static(select: Select, _step: Parameters, _row: int, expert: int, chunk: Chunk) -> bool:
    chosen = select.static + 4 * (expert * select.total + chunk.start // CHUNK * min(CHUNK, select.k_chunk))
    for c in range(chunk.k):
        set_int(chunk.out + 4 * c, get_int(chosen + 4 * c))
    return True


@routine
def _random(select: Select, step: Parameters, row: int, _expert: int, chunk: Chunk) -> bool:
    if select.wanted != 0:
        row = numba.int64(get_int(step.logit_rows + 4 * row))
    position = numba.int64(get_int(step.positions + 4 * row))
    select_random(select.seed, select.layer, position, chunk)
    return True


@kernel
def _chunk_of(select: Select, row: int, number: int) -> Chunk:
    """A chunk of a row."""
    x, out = select.x.at + row * select.x.stride, select.chosen.at + row * select.chosen.stride
    width = min(CHUNK, select.width - number * CHUNK)
    k = min(width, (select.k_chunk * width + CHUNK - 1) // CHUNK)
    return Chunk(x, number * CHUNK, width, k, out + 4 * number * min(CHUNK, select.k_chunk))


@kernel
def _select(choose: Any, i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run a SELECT instruction: a part is a range of chunks."""
    select, step = select_at(i), parameters_at(control)
    if step.compensate == 0:
        return
    by_slot = select.routes.counts != 0
    rows, chunks = rows_of(control, select.wanted), (select.width + CHUNK - 1) // CHUNK
    if by_slot:
        rows = counts_at(select.routes.counts).pairs
    # To measure recall a row must stay in one part.
    first, last = share_of(rows if select.measure != 0 else rows * chunks, part, parts)
    if select.measure != 0:
        first, last = first * chunks, last * chunks
    for item in range(first, last):
        row, number = item // chunks, item % chunks
        place, expert = row, 0
        if by_slot:
            pair = pair_at(select.routes.pairs + PAIR_BYTES * row)
            row, place, expert = pair.row, pair.slot, pair.expert
        if not choose(select, step, row, expert, _chunk_of(select, place, number)):
            write_word(control + _FAILED, 1)
        if select.measure != 0 and number == chunks - 1:
            call_3(header_at(i).inner, i, item // chunks, scratch)


def _by(name: str, choose: Any) -> Unit:
    """A unit of SELECT instructions, with one way to choose."""

    def select(i: int, control: int, part: int, parts: int, scratch: int) -> None:
        _select(choose, i, control, part, parts, scratch)

    return made_unit(name, select)


select_by_buckets = _by("select_by_buckets", _approx)
select_largest = _by("select_largest", _exact)
select_always = _by("select_always", _static)
select_any = _by("select_any", _random)


@compiled_unit
def add_recall(i: int, row: int, scratch: int) -> None:
    """Add a row's recall: the share of its `total` largest channels that were chosen; by slot, a pair's to its row."""
    select, of = select_at(i), row
    if select.routes.counts != 0:
        pair = pair_at(select.routes.pairs + PAIR_BYTES * row)
        row, of = pair.slot, pair.row
    x, chosen, total = select.x.at + row * select.x.stride, select.chosen.at + row * select.chosen.stride, select.total
    hits = numba.float32(count_hits(x, select.width, chosen, total, scratch)) / numba.float32(total)
    to = select.hits + 4 * of
    set_float(to, numba.float32(get_float(to) + hits))


class Choice(NamedTuple):
    """Announcement of a row's chosen channels."""

    at: int  # address of a word; 0: chosen before the instruction began
    number: int  # its value once they are chosen


MADE_BEFORE = Choice(0, 0)
"""Channels already chosen."""


@kernel
def is_made(choice: Choice) -> bool:
    """Whether the channels may be read."""
    return choice.at == 0 or read_word(choice.at) == choice.number


@kernel
def choose(i: int, control: int, part: int, scratch: int) -> Choice:
    """Ensure that the channels of the LINEAR instruction at address i, in a step of one row, are chosen."""
    before = i - 8 * WIDTH
    header = header_at(before)
    if parameters_at(control).rows != 1 or header.parts != BESIDE:
        return MADE_BEFORE
    choice = Choice(before + CHOSEN_IN, number_of(read_word(control + 8 * TURN)))
    if part == 0:
        call_5(header.unit, before, control, 0, 1, scratch)
        write_word(choice.at, choice.number)
    return choice
