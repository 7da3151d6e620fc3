"""Ahead-of-time compiler: turns a Python function into an object file that any process can load.

numba types the function and its callees and generates LLVM code (`runtime.backends.cpu.machine.kernel`). It is linked,
optimized and compiled here, once, with all names but one private, so that units from different processes cannot clash.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
from numba import types

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.loader import WINDOWS_CALLS, target_machine

_OUTSIDE = frozenset(
    {
        *("sqrtf", "sched_yield", "syscall", "usleep", "SwitchToThread", *WINDOWS_CALLS),
        *("os_sync_wait_on_address", "os_sync_wake_by_address_all"),
    }
)
"""Functions of the C library and of the system that kernels call by name."""


def machine_code(function: Callable[..., None], symbol: str) -> bytes:
    """Compile a function.

    Args:
        function: A function of integers that returns nothing and raises nothing.
        symbol: Name of the resulting C function of int64 arguments.

    Returns:
        An object file.

    Raises:
        Exception: any error from numba or LLVM.
    """
    count = function.__code__.co_argcount
    compiled = kernel(function).get_compile_result(types.void(*[types.int64] * count))
    module = compiled.library.whole()
    module.link_in(llvm.parse_assembly(_entry(symbol, compiled.fndesc.llvm_func_name, count)))
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
    """LLVM code of a C function that calls numba's and ignores its status, which is constant for kernels."""
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
