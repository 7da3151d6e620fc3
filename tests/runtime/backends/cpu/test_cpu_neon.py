"""Arm's variants: how one is chosen, and the machine code that is compiled ahead for processors not at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest

from runtime.backends.cpu.machine import isa
from tests.lab import cpu_code

DOTPROD, I8MM = 1 << 20, 1 << 13


@pytest.mark.parametrize(
    ("first", "second", "best"), [(0, 0, "generic"), (DOTPROD, 0, "neon"), (DOTPROD, I8MM, "neon-i8mm")]
)
def test_linux_tells_the_variant(monkeypatch: pytest.MonkeyPatch, first: int, second: int, best: str) -> None:
    class Look:
        argtypes: Any = None
        restype: Any = None

        def __call__(self, vector: int) -> int:
            return {16: first, 26: second}[vector]

    monkeypatch.setattr(isa.ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=Look()))
    monkeypatch.setattr(isa.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(isa.sys, "platform", "linux")
    monkeypatch.setattr(llvm, "get_host_cpu_features", dict)
    assert isa.choose_variant(None) == best
    with pytest.raises(isa.BackendError, match="cannot run the 'avx2' kernels"):
        isa.choose_variant("avx2")


@pytest.mark.parametrize(("has", "best"), [((), "generic"), (("DotProd",), "neon"), (("DotProd", "I8MM"), "neon-i8mm")])
def test_macos_tells_the_variant(monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...], best: str) -> None:
    monkeypatch.setattr(isa.sysctl, "number", lambda name: int(name.rpartition("_")[2] in has))
    monkeypatch.setattr(isa.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(isa.sys, "platform", "darwin")
    monkeypatch.setattr(llvm, "get_host_cpu_features", dict)
    assert isa.choose_variant(None) == best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon, Cortex-A76", "neon-i8mm, Snapdragon X"])
def test_a_row_is_multiplied_by_dot_products_alone(name: str) -> None:
    """32 of 16 bytes for 512 weights, their codes unpacked between them; no product of other kinds, nothing spilled."""
    code = cpu_code.assembly(name.partition(",")[0], *cpu_code.TARGETS[name])
    loop = cpu_code.innermost(code["multiply_uniform_4"])
    words = [line.split()[0] for line in loop]
    assert words.count("sdot") + words.count("sdot.4s") == 32
    assert not {word for word in words if word.startswith(("mul", "mla", "smull"))}
    assert len(words) < 1.4 * 97  # what AVX2 needs
