"""The SELECT instruction: salient channels of every chunk of a row, one unit for each way of choosing them."""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import register_jitable

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.operands import inner_of, operands, parameter, rows_of, share_of
from runtime.backends.cpu.kernels.select import count_hits, select_approx, select_exact, select_random
from runtime.backends.cpu.machine.sync import FAILED, write_word
from runtime.backends.cpu.machine.unit import call_6, compiled_unit
from runtime.backends.cpu.machine.vector import as_float, get_float, get_int, set_float, set_int
from runtime.operations.channels import CHUNK

_FAILED = 8 * FAILED
_operands = operands(op.SELECT)


@register_jitable
def _approx(i: int, _control: int, _row: int, source: int, start: int, size: int, k: int, to: int) -> bool:
    b15, upper, lower = _operands(i)[9:12]
    return select_approx(source, start, size, k, as_float(b15), as_float(upper), as_float(lower), to)


@register_jitable
def _exact(_i: int, _control: int, _row: int, source: int, start: int, size: int, k: int, to: int) -> bool:
    return select_exact(source, start, size, k, to)


@register_jitable
def _static(i: int, _control: int, _row: int, _source: int, start: int, _size: int, k: int, to: int) -> bool:
    chosen = _operands(i)[12] + 4 * (start // CHUNK * min(CHUNK, _operands(i)[3]))
    for c in range(k):
        set_int(to + 4 * c, get_int(chosen + 4 * c))
    return True


@register_jitable
def _random(i: int, control: int, row: int, _source: int, start: int, size: int, k: int, to: int) -> bool:
    if _operands(i)[7] == 1:
        row = numba.int64(get_int(parameter(control, op.LOGIT_ROWS) + 4 * row))
    position = numba.int64(get_int(parameter(control, op.POSITIONS) + 4 * row))
    select_random(_operands(i)[13], _operands(i)[14], position, start, size, k, to)
    return True


@numba.njit(nogil=True)
def _select(choose: Any, i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    x, x_stride, width, k_chunk, total, chosen, chosen_stride, which = _operands(i)[:8]
    measure, hits = _operands(i)[15], _operands(i)[16]
    if parameter(control, op.COMPENSATE) == 0:
        return
    rows, chunks = rows_of(control, which), (width + CHUNK - 1) // CHUNK
    full = min(CHUNK, k_chunk)
    # With recall to measure a row has to stay with one thread.
    first, last = share_of(rows if measure != 0 else rows * chunks, thread, threads)
    if measure != 0:
        first, last = first * chunks, last * chunks
    for item in range(first, last):
        row, chunk = item // chunks, item % chunks
        source, to = x + row * x_stride, chosen + row * chosen_stride + 4 * chunk * full
        start = chunk * CHUNK
        size = min(CHUNK, width - start)
        k = min(size, (k_chunk * size + CHUNK - 1) // CHUNK)
        if not choose(i, control, row, source, start, size, k, to):
            write_word(control + _FAILED, 1)
        if measure != 0 and chunk == chunks - 1:
            call_6(inner_of(i), source, width, chosen + row * chosen_stride, total, scratch, hits + 4 * row)


@compiled_unit
def select_by_buckets(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: approximate top-k."""
    _select(_approx, i, control, thread, threads, scratch)


@compiled_unit
def select_largest(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: exact top-k."""
    _select(_exact, i, control, thread, threads, scratch)


@compiled_unit
def select_always(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: the same channels every time."""
    _select(_static, i, control, thread, threads, scratch)


@compiled_unit
def select_any(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the SELECT instruction at address i: random channels."""
    _select(_random, i, control, thread, threads, scratch)


@compiled_unit
def add_recall(x: int, width: int, chosen: int, total: int, scratch: int, sums: int) -> None:
    """Add the share of a row's `total` largest channels that were chosen to the float32 at `sums`."""
    hits = numba.float32(count_hits(x, width, chosen, total, scratch)) / numba.float32(total)
    set_float(sums, numba.float32(get_float(sums) + hits))
