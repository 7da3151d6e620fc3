"""The C library's heap gives back what was freed."""

from __future__ import annotations

import platform

import psutil
import pytest

from runtime.system.heap import trim

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
