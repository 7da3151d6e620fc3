"""Instruction-set variant of the CPU kernels, and the cache folder of their machine code.

This is the only module here that reads the environment and the processor at import; only the CPU backend imports it,
when it is built.

Variants: `amx` (tile registers for products of many rows, everything else as `avx512`), `avx512` (512-bit VNNI dot
product), `avxvnni` (256-bit VNNI), `avx2` (multiply-add pairs of bytes), `neon` (Arm's dot product of signed bytes),
`neon-i8mm` (also that of unsigned with signed bytes) and `generic` (plain LLVM vectors, which every target lowers in
its own way). `amx-emulated` is `amx` with tile registers in memory, for tests.
`LOWBIT_CHAT_CPU_VARIANT` forces one.

Machine code is stored in the cache folder (`runtime.system.private_files.kernel_folder`), in the files of
`runtime.backends.cpu.machine.code_cache`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Final

import llvmlite.binding as llvm

from runtime.errors import BackendError
from runtime.system.private_files import kernel_folder
from tuner import sysctl

VARIANTS: Final = ("amx", "avx512", "avxvnni", "avx2", "neon-i8mm", "neon", "generic", "amx-emulated")

_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"})
_REQUIRED: Final[dict[str, frozenset[str]]] = {
    "amx": _AVX512 | {"amx-tile", "amx-int8"},
    "avx512": _AVX512,
    "avxvnni": frozenset({"avx2", "avxvnni"}),
    "avx2": frozenset({"avx2"}),
    "neon-i8mm": frozenset({"dotprod", "i8mm"}),
    "neon": frozenset({"dotprod"}),
    "generic": frozenset(),
    "amx-emulated": _AVX512,
}
_ARM: Final = ("aarch64", "arm64")
_ARM_FEATURES: Final = {
    "dotprod": (16, 1 << 20, "hw.optional.arm.FEAT_DotProd"),
    "i8mm": (26, 1 << 13, "hw.optional.arm.FEAT_I8MM"),
}
"""Features of Arm's processors by LLVM's names: where Linux's auxiliary vector has them (AT_HWCAP or AT_HWCAP2, and the
bit), and macOS's name."""
_WINDOWS_DOT_PRODUCT: Final = 43
"""Windows: PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call, ARCH_REQ_XCOMP_PERM, and the state component of the tile registers."""


def supported_variants() -> tuple[str, ...]:
    """Variants that this processor supports, best first."""
    features = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if platform.machine().lower() not in ("x86_64", "amd64"):
        features = arm_features()
    # AVX-512 VL with VNNI has the 256-bit dot product too, under the same LLVM intrinsic.
    if _REQUIRED["avx512"] <= features:
        features.add("avxvnni")
    found = [name for name in VARIANTS if _REQUIRED[name] <= features]
    if "amx" in found and not tile_registers_permitted():
        found.remove("amx")
    return tuple(found)


def arm_features() -> set[str]:
    """Features of an Arm processor, as the system tells them: LLVM's own look misses some. Empty on others.

    Source: Linux, Documentation/arch/arm64/elf_hwcaps.rst; macOS, https://developer.apple.com/documentation/kernel/
    1387446-sysctlbyname/determining_instruction_set_characteristics; Windows, IsProcessorFeaturePresent.
    """
    if platform.machine().lower() not in _ARM:
        return set()
    system: str = sys.platform  # a variable, so that type checkers look at every branch
    if system == "linux":
        look = ctypes.CDLL(None).getauxval
        look.argtypes, look.restype = (ctypes.c_ulong,), ctypes.c_ulong
        return {name for name, (vector, bit, _) in _ARM_FEATURES.items() if look(vector) & bit}
    if system == "darwin":
        return {name for name, (*_, key) in _ARM_FEATURES.items() if sysctl.number(key)}
    if system == "win32":
        present = ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(_WINDOWS_DOT_PRODUCT)  # type: ignore[attr-defined, unused-ignore]
        return {"dotprod"} if present else set()
    return set()


def tile_registers_permitted() -> bool:
    """Request permission to use the tile registers, for this process and the threads it starts.

    Returns:
        Whether it was granted. A kernel that does not know the request denies it, as does one if a thread's signal
        stack is too small for the larger state.

    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    if sys.platform != "linux":
        return False
    request = ctypes.CDLL(None, use_errno=True).syscall
    request.argtypes, request.restype = (ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong), ctypes.c_long
    return bool(request(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def choose_variant(forced: str | None) -> str:
    """The variant to compile for.

    Args:
        forced: A name from `VARIANTS`, or None for the best one.

    Raises:
        BackendError: the forced variant is unknown, or this processor lacks its instructions.
    """
    available = supported_variants()
    if forced is None or forced == "":
        return available[0]
    if forced not in VARIANTS:
        raise BackendError(
            f"LOWBIT_CHAT_CPU_VARIANT is {forced!r}; use one of {', '.join(VARIANTS)}, or unset it for the best one"
        )
    if forced not in available:
        raise BackendError(
            f"this processor cannot run the {forced!r} kernels; available here: {', '.join(available)}. "
            "Unset LOWBIT_CHAT_CPU_VARIANT for the best one"
        )
    return forced


VARIANT: Final = choose_variant(os.environ.get("LOWBIT_CHAT_CPU_VARIANT"))
"""Variant of this process's kernels."""

VECTORS: Final = "avx512" if VARIANT.startswith("amx") else VARIANT.removesuffix("-i8mm")
"""Variant of the vector instructions used."""

ENTRY_OFFSET: Final = 128 if VECTORS in ("avx512", "avxvnni") else 0
"""Offset of signed bytes of weights in registers: the dot product of these variants needs unsigned ones."""
VBMI: Final = VECTORS == "avx512" and bool(llvm.get_host_cpu_features().get("avx512vbmi"))
"""Whether bytes can be looked up among 128, and cut out of words at any bit, in one instruction."""

KERNEL_CACHE: Final = kernel_folder(VARIANT)
"""Folder of this variant's machine code."""
