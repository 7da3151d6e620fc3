"""Tile registers: bit-exact integer products, emulated everywhere and real where available."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from runtime.backends.cpu.machine import isa

ROOT = Path(__file__).parents[4]
HAS_REGISTERS = "amx" in isa.supported_variants()

_ASSEMBLY = """
import sys
import llvmlite.binding as llvm
from runtime.backends.cpu.machine import isa
isa.VARIANT, isa.VECTORS = "amx", "avx512"
from runtime.backends.cpu.machine import kernel as compiler
from runtime.backends.cpu.units import w4a8
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
compiler.target_machine = lambda: target.create_target_machine(
    cpu="sapphirerapids", opt=3, reloc="static", codemodel="jitdefault", jit=True
)
llvm.TargetMachine.emit_object = lambda machine, module: machine.emit_assembly(module).encode()
print(compiler.machine_code(w4a8.multiply_w4a8.function, "multiply_w4a8").decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "amx-emulated",
        pytest.param("amx", marks=pytest.mark.skipif(not HAS_REGISTERS, reason="this processor or kernel has no AMX")),
    ],
)
def test_products_by_tile_registers_have_the_bits_of_the_integers(variant: str) -> None:
    """The tests of W4A8 matrices, in a process of that variant: products, and activations in its layout."""
    if variant not in isa.supported_variants():
        pytest.skip(f"this processor cannot run {variant}")
    own, products = (
        Path(__file__).with_name("test_cpu_w4a8.py"),
        ROOT / "tests/runtime/backends/contract/test_products.py",
    )
    quiet = ("-q", "-n", "0", "-x", "-p", "no:cacheprovider", "-k", "not triton")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, str(own), str(products)],
        cwd=ROOT,
        env={**os.environ, "LOWBIT_CHAT_CPU_VARIANT": variant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert re.search(r"\d+ passed", result.stdout), result.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the assembly is that of Linux")
def test_the_machine_code_for_a_processor_with_amx() -> None:
    """Compiled ahead of time: registers opened and closed, and an inner loop of loads and products alone."""
    features = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0"}
    result = subprocess.run(
        [sys.executable, "-c", _ASSEMBLY],
        cwd=ROOT,
        env={**os.environ, **features, "LOWBIT_CHAT_CPU_VARIANT": "generic"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.strip().replace("\t", " ") for line in result.stdout.splitlines()]
    names = [line.split(" ")[0] for line in lines]
    assert names.count("ldtilecfg") == 1
    assert names.count("tilerelease") >= 1
    assert any(re.fullmatch(r"tdpbsud %tmm7, %tmm\d, %tmm3", line) for line in lines), "four sums at once"
    products = [i for i, name in enumerate(names) if name == "tdpbsud"]
    # From the first product of four sums to the last one nothing else is computed, and no vector leaves its register.
    first = next(i for i in products if "%tmm3" in lines[i] and lines[i].endswith("%tmm3"))
    last = max(i for i in products if lines[i].endswith("%tmm3"))
    assert not [line for line in lines[first:last] if "zmm" in line or "ymm" in line or "xmm" in line]
    inside = names[first:last]
    assert inside.count("tileloadd") <= 1.25 * inside.count("tdpbsud") + 2, (
        "weights are loaded once for four row blocks"
    )


def test_without_permission_the_next_best_variant_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = isa._REQUIRED["amx"]
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(names, True))
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    for permitted, best in ((True, "amx"), (False, "avx512")):
        monkeypatch.setattr(isa, "tile_registers_permitted", lambda permitted=permitted: permitted)
        assert isa.choose_variant(None) == best
    with pytest.raises(isa.BackendError, match="cannot run the 'amx' kernels"):
        isa.choose_variant("amx")


def test_permission_is_not_asked_for_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(isa._REQUIRED["avx512"], True))
    monkeypatch.setattr(isa, "tile_registers_permitted", lambda: pytest.fail("asked"))
    isa.supported_variants()


def test_where_the_kernel_cannot_be_asked_there_are_no_tile_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa.sys, "platform", "win32")
    assert not isa.tile_registers_permitted()
