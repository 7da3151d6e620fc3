"""Kernels: numba functions that compiled code calls, never Python; and the compiler that turns units into object files.

By default, numba makes each function callable from Python: it writes two wrappers, links the code of all callees into
every caller again, and has LLVM compile the result. Here a function's LLVM code is kept as it was written. What a unit
needs is linked, optimized and compiled once (`machine_code`), with all names but one private, so that units from
different processes cannot clash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import typed_passes, untyped_passes
from numba.core.cgutils import normalize_ir_text
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.extending import register_jitable

from runtime.backends.cpu.machine.emit import I64, Builder, define
from runtime.backends.cpu.machine.loader import WINDOWS_CALLS, target_machine


class Library(JITCodeLibrary):
    """The LLVM code of one kernel, and the libraries of the kernels that it calls."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Add code."""
        self._final_module.link_in(llvm.parse_assembly(normalize_ir_text(str(ir_module))))

    def add_linking_library(self, library: Any) -> None:
        """Note the library of a callee."""
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        """Do nothing: only units are compiled."""
        self._finalized = True

    def whole(self) -> llvm.ModuleRef:
        """The code of the kernel with that of all its direct and indirect callees."""
        whole, seen, waiting = self._final_module.clone(), {self}, [*self._linking_libraries]
        while waiting:
            if (library := waiting.pop()) not in seen:
                seen.add(library)
                waiting += library.give(whole) if isinstance(library, Library) else _give(library, whole)
        return whole

    def give(self, to: llvm.ModuleRef) -> list[Any]:
        """Add the kernel's own code to a module.

        Returns:
            The libraries of its callees.
        """
        to.link_in(self._final_module, preserve=True)
        return [*self._linking_libraries]

    def _get_module_for_linking(self) -> llvm.ModuleRef:
        """The code for a caller that is no kernel, which may get some of it from another callee, too."""
        if self._shared_module is None:
            self._shared_module = self.whole()
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = llvm.Linkage.linkonce_odr
        return self._shared_module


def _give(library: Any, to: llvm.ModuleRef) -> list[Any]:
    """The same for one of numba's own libraries, which has its callees' code."""
    to.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001  # numba calls it of any library, too
    return []


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(typed_passes.NativeLowering):
    """Generates LLVM code without compiling it."""

    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        state.flags.no_compile = True
        super().run_pass(state)
        found_by: list[Any] = []
        entry = found_by.append  # the key by which callers find the code: numba wants a unique built-in function
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=entry)
        return True


class _Compiler(CompilerBase):
    """numba's compiler with the passes that kernels need."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for each in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.RewriteSemanticConstants,
            untyped_passes.DeadBranchPrune,
            untyped_passes.GenericRewrites,
            untyped_passes.ReconstructSSA,
            untyped_passes.DeadBranchPrune,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.NoPythonSupportedFeatureValidation,
            typed_passes.IRLegalization,
            typed_passes.AnnotateTypes,
            _Lowering,
            typed_passes.NoPythonBackend,
        ):
            passes.add_pass(each, "")
        passes.finalize()
        return [passes]


class Kernel(CPUDispatcher):
    """A function that compiled code calls."""

    def __call__(self, *_arguments: Any) -> Any:
        """Refuse a call from Python, which has no way in.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self.py_func.__qualname__} is a kernel: only compiled code calls it")


_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",  # no checks for division by zero, which kernels could not report
    "_nrt": False,  # they allocate nothing
}


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of a function that only compiled code calls."""
    return Kernel(function, targetoptions=_OPTIONS, pipeline_class=_Compiler)


def routine(function: Callable[..., Any]) -> Any:
    """Decorator of a function that kernels call or are made from, and that stays a Python function.

    Unlike a `kernel`, it can be passed to kernels, and made in a function from others.
    """
    return register_jitable(pipeline_class=_Compiler, **_OPTIONS)(function)


def _caller(count: int) -> Any:
    def emit(b: Builder, address: Any, *values: Any) -> None:
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        b.call(b.inttoptr(address, function.as_pointer()), list(values))

    emit.__name__ = f"call_{count}"
    emit.__doc__ = f"Call the unit at an address with {count} arguments."
    return define(types.void, types.int64, *[types.int64] * count)(emit)


call_3, call_4, call_5 = (_caller(count) for count in (3, 4, 5))


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
