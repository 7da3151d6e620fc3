"""Thread synchronization: taking turns and parts of a program's instructions, and sleeping between programs.

Threads never wait for a particular thread, only for work to be done. An instruction is cut into parts, each free thread
takes the next part, and when the last part is done the next instruction begins. A preempted thread only delays its
current part, a slow core takes fewer parts than a fast one, and threads may join and leave at any time. The words are
those of a control block (`runtime.backends.cpu.data.records`).

To sleep until a word changes, Linux has futex, Windows WaitOnAddress, macOS since 14.4 os_sync_wait_on_address. All
three compare the word with a value in the kernel, so no wake-up is lost between a look at the word and sleeping.
Elsewhere a thread polls.

Source: futex(2); https://learn.microsoft.com/windows/win32/api/synchapi/nf-synchapi-waitonaddress; os/os_sync_wait_on_
address.h of macOS's SDK. Of these only Linux's has been seen running.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.data.records import ACTIVE, CLOSED, SLEEPERS, TURN
from runtime.backends.cpu.machine.emit import I32, I64, Builder, Emit, call, define, pointer
from runtime.backends.cpu.machine.kernel import kernel

_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98}
"""Number of Linux's system call by `platform.machine()`."""
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
"""Operations on a futex within one process."""
_WORD_BYTES = 4
_FOR_EVER = 0xFFFFFFFF
"""Windows: INFINITE milliseconds."""
_POLL_US = 20
"""Microseconds between two looks where the system cannot wait for a word."""


@dataclass(frozen=True, slots=True)
class Sleeping:
    """LLVM code of a system's calls."""

    sleep: Emit
    """Sleeps while the 32-bit word at an address has a value (the low half of an int64); may wake early."""
    wake: Emit
    """Wakes every thread that sleeps at an address."""
    give_way: Emit
    """Yields the core to another thread."""


def sleeping(system: str, machine: str, *, waits: bool) -> Sleeping:
    """The calls of a system.

    Args:
        system: `sys.platform`.
        machine: `platform.machine()`, in lower case.
        waits: Whether macOS has os_sync_wait_on_address.
    """
    give_way = _function("SwitchToThread") if system == "win32" else _function("sched_yield")
    if system == "linux" and machine in _FUTEX:
        return Sleeping(_futex_wait(_FUTEX[machine]), _futex_wake(_FUTEX[machine]), give_way)
    if system == "win32":
        return Sleeping(_wait_windows, _wake_windows, give_way)
    if system == "darwin" and waits:
        return Sleeping(_wait_macos, _wake_macos, give_way)
    return Sleeping(_poll, _wake_nobody, give_way)


def macos_waits() -> bool:
    """Whether this is a macOS with os_sync_wait_on_address."""
    return sys.platform == "darwin" and hasattr(ctypes.CDLL(None), "os_sync_wait_on_address")


def _call(b: Builder, name: str, result: Any, *values: Any) -> None:
    function = ir.FunctionType(result, [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, function, name), list(values))


def _number(value: int, width: Any = I64) -> Any:
    return ir.Constant(width, value)


def _function(name: str) -> Emit:
    def emit(b: Builder) -> None:
        _call(b, name, I32)

    return emit


def _system_call(b: Builder, *arguments: Any) -> None:
    function = ir.FunctionType(I64, [I64], var_arg=True)
    b.call(cgutils.get_or_insert_function(b.module, function, "syscall"), list(arguments))


def _futex_wait(number: int) -> Emit:
    def emit(b: Builder, address: Any, value: Any) -> None:
        low = b.and_(value, _number(0xFFFFFFFF))
        zeros = [_number(0)] * 3
        _system_call(b, _number(number), address, _number(_FUTEX_WAIT), low, *zeros)

    return emit


def _futex_wake(number: int) -> Emit:
    def emit(b: Builder, address: Any) -> None:
        zeros = [_number(0)] * 3
        _system_call(b, _number(number), address, _number(_FUTEX_WAKE), _number((1 << 31) - 1), *zeros)

    return emit


def _wait_windows(b: Builder, address: Any, value: Any) -> None:
    compared = cgutils.alloca_once(b, I32)
    b.store(b.trunc(value, I32), compared)
    _call(b, "WaitOnAddress", I32, pointer(b, address), compared, _number(_WORD_BYTES), _number(_FOR_EVER, I32))


def _wake_windows(b: Builder, address: Any) -> None:
    _call(b, "WakeByAddressAll", ir.VoidType(), pointer(b, address))


def _wait_macos(b: Builder, address: Any, value: Any) -> None:
    low, size, flags = b.and_(value, _number(0xFFFFFFFF)), _number(_WORD_BYTES), _number(0, I32)
    _call(b, "os_sync_wait_on_address", I32, pointer(b, address), low, size, flags)


def _wake_macos(b: Builder, address: Any) -> None:
    _call(b, "os_sync_wake_by_address_all", I32, pointer(b, address), _number(_WORD_BYTES), _number(0, I32))


def _poll(b: Builder, _address: Any, _value: Any) -> None:
    _call(b, "usleep", I32, _number(_POLL_US, I32))


def _wake_nobody(_b: Builder, _address: Any) -> None:
    """Who polls wakes by itself."""


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
