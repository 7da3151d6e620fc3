"""From a Python function to an object file that any process can load.

numba types the function and all that it calls and writes LLVM code. By itself it would also optimize every one of them
alone, then again inside each caller, and compile each; here the whole is optimized and compiled once, with all names
but one private, so that units compiled in different processes can't meet in a name. With NUMBA_OPT=0 in the
environment, as in the processes of `runtime.backends.cpu.machine.build`, numba leaves all optimizing to this.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
import numba
from numba import types

from runtime.backends.cpu.machine.loader import target_machine

_OUTSIDE = frozenset({"sched_yield", "usleep", "nanosleep", "syscall", "SwitchToThread", "Sleep", "sqrtf"})
"""Functions of the C library that kernels call by name."""
_WRAPPER = "cfunc."
"""What numba puts before a function's name for its C wrapper, which can report errors, and for that needs numba."""


def machine_code(function: Callable[..., None], symbol: str) -> bytes:
    """Compile a function.

    Args:
        function: A function of integers that returns nothing and raises nothing.
        symbol: What the C function of int64 arguments is to be called.

    Returns:
        An object file.

    Raises:
        Exception: whatever numba or LLVM say.
    """
    count = function.__code__.co_argcount
    compiled = numba.cfunc(types.void(*[types.int64] * count), error_model="numpy")(function)
    module = llvm.parse_assembly(compiled.inspect_llvm())
    module.link_in(llvm.parse_assembly(_entry(symbol, compiled.native_name.removeprefix(_WRAPPER), count)))
    for defined in [*module.functions, *module.global_variables]:
        if not defined.is_declaration and defined.name != symbol:
            defined.linkage = "internal"
    machine = target_machine()
    _optimize(module, machine)
    declared = {found.name for found in module.functions if found.is_declaration}
    if foreign := {name for name in declared if not name.startswith("llvm.")} - _OUTSIDE:
        raise RuntimeError(f"it calls {', '.join(sorted(foreign))}, which other processes may not have")
    return bytes(machine.emit_object(module))


def _entry(symbol: str, native: str, count: int) -> str:
    """LLVM code of a C function that calls numba's, which gives back a status, for a kernel always the same."""
    numbers = [f"i64 %{i}" for i in range(count)]
    arguments = ", ".join(["ptr %result", "ptr %error", *numbers])
    return f"""
        declare i32 @"{native}"({", ".join(["ptr", "ptr", *["i64"] * count])})
        define void @"{symbol}"({", ".join(numbers)}) {{
        entry:
          %result = alloca ptr
          %error = alloca ptr
          %status = call i32 @"{native}"({arguments})
          ret void
        }}
    """


def _optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Optimize, with the settings of numba's own pipeline."""
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    unused = llvm.create_new_module_pass_manager()
    unused.add_global_dead_code_eliminate_pass()
    unused.run(module, builder)
    builder.getModulePassManager().run(module, builder)
