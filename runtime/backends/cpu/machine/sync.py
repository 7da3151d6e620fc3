"""How the threads of the pool keep step: atomic words, a barrier, and waiting that yields the processor.

One parallel region runs a whole step, so threads meet a few hundred times a token and a barrier has to cost well under
a microsecond: threads spin, and after a while give way to whoever else wants the core.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.machine.emit import I32, I64, Builder, call, define, pointer

# Word offsets into the control block; each hot word has a cache line (8 words) of its own.
ARRIVED = 0
"""Threads that reached the barrier."""
PHASE = 8
"""Barriers passed."""
TICKET = 16
"""Steps started; workers wait for it to change."""
STOP = 24
"""1 when workers are to leave."""
FAILED = 32
"""1 when a NaN or infinity was met."""
CONTROL_WORDS = 64

_SPINS = 4096
_X86 = platform.machine().lower() in ("x86_64", "amd64")


@define(types.int64, types.int64)
def read_word(b: Builder, address: Any) -> Any:
    """Atomic load, acquire."""
    return b.load_atomic(pointer(b, address), ordering="acquire", align=8, typ=I64)


@define(types.void, types.int64, types.int64)
def write_word(b: Builder, address: Any, value: Any) -> None:
    """Atomic store, release: an exchange, for llvmlite's own store does not know opaque pointers."""
    b.atomic_rmw("xchg", pointer(b, address), value, ordering="acq_rel")


@define(types.int64, types.int64, types.int64)
def add_word(b: Builder, address: Any, value: Any) -> Any:
    """Atomic addition; returns the value before it."""
    return b.atomic_rmw("add", pointer(b, address), value, ordering="acq_rel")


@define(types.void)
def relax(b: Builder) -> None:
    """Tell the core that this is a spin loop."""
    if _X86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


@define(types.void)
def give_way(b: Builder) -> None:
    """Let another thread have the core."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), name), [])


@define(types.void, types.int32)
def nap(b: Builder, microseconds: Any) -> None:
    """Sleep; the unit is milliseconds, rounded up, on Windows."""
    if sys.platform == "win32":
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), [I32]), "Sleep")
        b.call(function, [ir.Constant(I32, 1)])
    else:
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [I32]), "usleep"), [microseconds])


@numba.njit(nogil=True)
def barrier(control: int, threads: int) -> None:
    """Wait until all threads are here. `control` is the address of the control block."""
    if threads == 1:
        return
    phase = read_word(control + 8 * PHASE)
    if add_word(control + 8 * ARRIVED, 1) + 1 == threads:
        write_word(control + 8 * ARRIVED, 0)
        write_word(control + 8 * PHASE, phase + 1)
        return
    spins = 0
    while read_word(control + 8 * PHASE) == phase:
        spins += 1
        if spins < _SPINS:
            relax()
        else:
            give_way()


@numba.njit(nogil=True)
def wait_for_ticket(control: int, seen: int) -> int:
    """Wait for a step to start or for the end. Returns the new ticket, or -1 at the end.

    Spins for some microseconds, for the next token is usually that near, then naps: an idle engine costs nothing.
    """
    spins = 0
    while True:
        if read_word(control + 8 * STOP) != 0:
            return -1
        ticket = read_word(control + 8 * TICKET)
        if ticket != seen:
            return ticket
        spins += 1
        if spins < _SPINS:
            relax()
        else:
            nap(50)
