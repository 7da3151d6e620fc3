"""The C library's heap gives back what was freed, and code that has run its pages."""

from __future__ import annotations

import platform
import sys

import psutil
import pytest

from runtime.system.heap import release_code, trim

BLOCK, COUNT = 64 << 10, 400


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was freed until it is asked")
def test_freed_memory_goes_back() -> None:
    process = psutil.Process()
    blocks = [bytearray(b"x") * BLOCK for _ in range(COUNT)]
    last = blocks[-1]
    del blocks
    before = process.memory_info().rss
    trim()
    assert before - process.memory_info().rss > BLOCK * COUNT // 2
    assert last[0] == ord("x")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a library's code is mapped")
def test_code_that_has_run_leaves_memory_and_runs_again() -> None:
    import llvmlite.binding as llvm

    def compiled() -> str:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly("define i32 @f(i32 %x) { %y = add i32 %x, 1 ret i32 %y }")
        machine = llvm.Target.from_default_triple().create_target_machine()
        return machine.emit_assembly(module)

    process, first = psutil.Process(), compiled()
    before = process.memory_info().rss
    release_code("libllvmlite")
    assert before - process.memory_info().rss > 4 << 20
    assert compiled() == first
    release_code("no such library")
