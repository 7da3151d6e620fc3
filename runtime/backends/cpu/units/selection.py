"""Units of SELECT instructions: salient channels of every chunk of a row, one unit for each selector.

In a step of one row SELECT has no turn of its own: the next product does not need the channels before it compensates,
so the thread with the product's first part chooses them (`choose`) and announces them in the instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.control import FAILED, TURN
from runtime.backends.cpu.data.experts import PAIR_BYTES
from runtime.backends.cpu.data.instructions import BESIDE, CHOSEN_IN, WIDTH, Select
from runtime.backends.cpu.data.step import Parameters
from runtime.backends.cpu.kernels.select import (
    Chunk,
    count_hits,
    select_approx,
    select_exact,
    select_random,
)
from runtime.backends.cpu.kernels.views import (
    counts_at,
    header_at,
    pair_at,
    parameters_at,
    rows_of,
    select_at,
    share_of,
)
from runtime.backends.cpu.machine.calls import call_3, call_5
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.sync import number_of, read_word, write_word
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import get_float, get_int, set_float, set_int
from runtime.backends.operations.channels import CHUNK

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


@compiled_unit
def select_by_buckets(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: approximate top-k."""
    _select(_approx, i, control, part, parts, scratch)


@compiled_unit
def select_largest(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: exact top-k."""
    _select(_exact, i, control, part, parts, scratch)


@compiled_unit
def select_always(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: the same channels every time."""
    _select(_static, i, control, part, parts, scratch)


@compiled_unit
def select_any(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: random channels."""
    _select(_random, i, control, part, parts, scratch)


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

    at: int
    """Address of a word; 0: chosen before the instruction began."""
    number: int
    """Its value once they are chosen."""


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
