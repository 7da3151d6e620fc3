"""Machine code that was compiled before, made runnable in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class LoadedCode:
    """A routine that can be called."""

    address: int
    """Where it is."""
    engine: Any
    """What owns the memory that it is in."""


_held: list[LoadedCode] = []
"""Everything loaded: addresses are written into programs, so code stays as long as the process."""


def target_machine() -> llvm.TargetMachine:
    """What code for this processor is made with and loaded by."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def load_code(code: bytes, symbol: str) -> LoadedCode:
    """Load an object file.

    Args:
        code: The object file, whole, for LLVM ends the process over a damaged one. What it needs of others is in the C
            library.
        symbol: The function in it.
    """
    # Engines of their own keep the names of units apart.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    loaded = LoadedCode(engine.get_function_address(symbol), engine)
    _held.append(loaded)
    return loaded
