"""Loader: makes stored machine code callable in this process."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from runtime.backends.cpu.machine.isa import arm_features
from runtime.system.heap import release_code


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """A callable routine."""

    address: int
    """Its address."""
    engine: Any
    """Owner of its memory."""


WINDOWS_CALLS = ("WaitOnAddress", "WakeByAddressAll")
"""Functions outside the libraries that LLVM searches on Windows; compiled code calls them by name."""
_held: list[LoadedCode] = []
"""All loaded code. Programs contain addresses, so code is never unloaded."""
_awake = threading.Event()
"""Whether LLVM has run since `rest`."""


_STAND_INS = {"oryon-1": "neoverse-n1"}
"""Processors whose timing LLVM describes in part, so that compiling for them ends the process, and others like them."""


def processor(name: str) -> str:
    """The processor that code is compiled for, by LLVM's name of the one at hand."""
    return _STAND_INS.get(name, name)


def target_machine() -> llvm.TargetMachine:
    """The LLVM target machine that compiles and loads code for this processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=processor(llvm.get_host_cpu_name()),
        features=",".join([llvm.get_host_cpu_features().flatten(), *(f"+{name}" for name in sorted(arm_features()))]),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def rest() -> None:
    """Take LLVM's own code, some 40 MB, out of memory, if something was loaded since the last time."""
    if _awake.is_set():
        _awake.clear()
        release_code("libllvmlite")


@functools.cache
def _name_windows_calls() -> None:
    """Tell LLVM where `WINDOWS_CALLS` are."""
    library = ctypes.WinDLL("api-ms-win-core-synch-l1-2-0.dll")  # type: ignore[attr-defined, unused-ignore]
    for name in WINDOWS_CALLS:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)


def load_code(code: bytes, symbol: str) -> LoadedCode:
    """Load an object file.

    Args:
        code: A complete object file: LLVM aborts the process on a damaged one. It may only refer to the C library.
        symbol: The function in it.
    """
    _awake.set()
    if sys.platform == "win32":
        _name_windows_calls()
    # Separate engines keep the names of units apart.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    loaded = LoadedCode(engine.get_function_address(symbol), engine)
    _held.append(loaded)
    return loaded
