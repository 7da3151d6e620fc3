"""Unit that checks a step's results."""

from __future__ import annotations

import numba
import numpy as np

from runtime.backends.cpu.data.control import FAILED
from runtime.backends.cpu.kernels.cap import cap_floats
from runtime.backends.cpu.kernels.views import check_at, rows_of, share_of
from runtime.backends.cpu.machine.sync import write_word
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import absolute, lanes_below, load_floats

_FINITE = np.float32(3.4028235e38)
"""The largest of them."""
_ALL = 0xFFFF


@compiled_unit
def check(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Mark the step as failed if a wanted row is not finite, and cap it."""
    check = check_at(i)
    first, last = share_of(check.channels // 16, part, parts)
    for row in range(rows_of(control, 1)):
        x, finite = check.x.at + row * check.x.stride, numba.int64(_ALL)
        for v in range(first, last):
            finite &= lanes_below(absolute(load_floats(x + 64 * v)), _FINITE)
        if finite != _ALL:
            write_word(control + 8 * FAILED, 1)
        if check.cap != 0.0:
            cap_floats(x + 64 * first, 16 * (last - first), check.cap)
