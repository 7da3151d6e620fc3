"""Thread synchronization: taking turns and parts of a program's instructions, and sleeping between programs.

Threads never wait for a particular thread, only for work to be done. An instruction is cut into parts, each free thread
takes the next part, and when the last part is done the next instruction begins. A preempted thread only delays its
current part, a slow core takes fewer parts than a fast one, and threads may join and leave at any time.

The words are those of a control block (`runtime.backends.cpu.data.control`).
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.control import ACTIVE, CLOSED, SLEEPERS, TURN
from runtime.backends.cpu.machine.emit import I64, Builder, call, define, pointer
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.sleeping import macos_waits, sleeping

_NUMBERS = (1 << 32) - 1
_SPINS = 2000
"""Number of polls of an unchanged turn before a thread sleeps: some 20 to 70 microseconds, a few parts of work."""
_MACHINE = platform.machine().lower()
_X86 = _MACHINE in ("x86_64", "amd64")
_SYSTEM = sleeping(sys.platform, _MACHINE, waits=macos_waits())


@define(types.int64, types.int64)
def read_word(b: Builder, address: Any) -> Any:
    """Atomic load, acquire."""
    return b.load_atomic(pointer(b, address), ordering="acquire", align=8, typ=I64)


@define(types.void, types.int64, types.int64)
def write_word(b: Builder, address: Any, value: Any) -> None:
    """Atomic store, sequentially consistent: an exchange."""
    b.atomic_rmw("xchg", pointer(b, address), value, ordering="seq_cst")


@define(types.int64, types.int64, types.int64)
def add_word(b: Builder, address: Any, value: Any) -> Any:
    """Atomic addition; returns the value before it."""
    return b.atomic_rmw("add", pointer(b, address), value, ordering="seq_cst")


@define(types.void)
def relax(b: Builder) -> None:
    """Tell the core that this is a spin loop."""
    if _X86:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


@define(types.void, types.int64, types.int64)
def sleep_while(b: Builder, address: Any, value: Any) -> None:
    """Sleep while the 32-bit word at the address has a value; may wake early."""
    _SYSTEM.sleep(b, address, value)


@define(types.void, types.int64)
def wake_all(b: Builder, address: Any) -> None:
    """Wake every thread sleeping at the address."""
    _SYSTEM.wake(b, address)


@define(types.void)
def give_way(b: Builder) -> None:
    """Yield the core to another thread."""
    _SYSTEM.give_way(b)


@kernel
def wait_for(address: int, value: int) -> None:
    """Wait for another thread to write a value to a word, which it is about to do."""
    spins = 0
    while read_word(address) != value:
        relax()
        spins += 1
        if spins > _SPINS:  # that thread has been preempted
            give_way()


@kernel
def number_of(turn: int) -> int:
    """Number of the current instruction, below 2^32."""
    return (turn >> 32) & _NUMBERS


@kernel
def left_of(turn: int) -> int:
    """Number of parts left to take; 0 or less: none."""
    return (turn & _NUMBERS) - CLOSED


@kernel
def begin_turn(control: int, number: int, parts: int) -> None:
    """Start an instruction, or with 0 parts close the program, and wake sleeping threads."""
    write_word(control + 8 * TURN, ((number & _NUMBERS) << 32) | (CLOSED + parts))
    if read_word(control + 8 * SLEEPERS) != 0:
        wake_all(control + 8 * TURN + 4)


@kernel
def wait_while(control: int, number: int) -> None:
    """Wait until the turn has another number, or all threads must leave: spins, then sleeps.

    This must check for leaving too: a thread whose last look at ACTIVE came before it became 0, and whose last look at
    TURN came after the final turn, would otherwise wait forever.
    """
    for _ in range(_SPINS):
        if number_of(read_word(control + 8 * TURN)) != number:
            return
        relax()
    add_word(control + 8 * SLEEPERS, 1)
    while number_of(read_word(control + 8 * TURN)) == number and read_word(control + 8 * ACTIVE) != 0:
        sleep_while(control + 8 * TURN + 4, number)
    add_word(control + 8 * SLEEPERS, -1)


@kernel
def may_work(control: int, thread: int) -> bool:
    """Sleep while this thread is not active. Returns False if it must leave."""
    while True:
        active = read_word(control + 8 * ACTIVE)
        if active == 0 or thread < active:
            return active != 0
        sleep_while(control + 8 * ACTIVE, active)
