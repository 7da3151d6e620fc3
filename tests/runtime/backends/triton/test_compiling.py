"""Kernels compiled together, without a card: in a process of its own, whose driver only names a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[4]

KERNELS = '''
import json, sys
import torch, triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    """One card that is not there."""
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 89, 32))

driver.set_active(Driver())

@triton.jit
def add(x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)

@triton.jit
def wrong(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.reshape(tl.arange(0, N), [N // 32, 32]))

x = torch.zeros(64, dtype=torch.int32)
'''
TOGETHER = """
from runtime.backends.triton.compiling import compile_together
told, launched = [], []
run = JITFunction.run
steps = {steps}
compiled = compile_together([lambda s=s: launched.append([kernel[(1,)](x, N=n) for kernel, n in s]) for s in steps],
                            lambda *ready: told.append(ready))
kept = {{kernel.fn.__name__: sorted(type(one).__name__ for one in kernel.device_caches[0][0].values())
        for kernel in (add, wrong)}}
assert JITFunction.run is run and knobs.compilation.listener is None
print(json.dumps({{"compiled": compiled, "told": told, "launched": launched, "kept": kept}}))
"""


def together(folder: Path, steps: str, behind: str = "") -> dict[str, Any]:
    """What came of it, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    file = folder / "kernels.py"
    file.write_text(KERNELS + TOGETHER.format(steps=steps) + behind)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return json.loads(first) | {"said": rest}


def test_kernels_are_compiled_and_nothing_is_launched(tmp_path: Path) -> None:
    """A driver that can launch nothing would raise. Each variant is compiled once, however often it comes."""
    found = together(tmp_path, "[[(add, 32)], [(add, 64), (add, 128), (add, 64)], [(add, 128)]]")
    assert found["compiled"] == 3
    assert found["launched"] == [[None], [None] * 3, [None]]
    assert found["kept"]["add"] == ["CompiledKernel"] * 3
    assert found["told"] == [[1, 1], [1, 2], [2, 2]]
    again = together(tmp_path, "[[(add, 32)], [(add, 64)]]")
    assert (again["compiled"], len(again["launched"])) == (0, 1)


def test_other_threads_go_on_launching(tmp_path: Path) -> None:
    """This driver can launch nothing, and says so."""
    behind = """
from concurrent.futures import ThreadPoolExecutor
elsewhere = ThreadPoolExecutor(1)

def beside(done, total):
    try:
        elsewhere.submit(lambda: add[(1,)](x, N=32)).result()
    except AttributeError as error:
        print("launched")
    else:
        raise AssertionError("swallowed")

assert compile_together([lambda: add[(1,)](x, N=256)], beside) == 1
"""
    assert "launched" in together(tmp_path, "[[(add, 32)], []]", behind)["said"]


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(tmp_path: Path) -> None:
    behind = """
try:
    wrong[(1,)](x, N=16)
except triton.compiler.errors.CompilationError as error:
    assert "cannot change total number" in str(error), error
else:
    raise AssertionError("launched")
"""
    found = together(tmp_path, "[[(wrong, 16), (add, 32)], [(add, 64)]]", behind)
    assert found["kept"] == {"add": ["CompiledKernel"] * 2, "wrong": []}


def test_whoever_stops_it_leaves_nothing_that_waits(tmp_path: Path) -> None:
    behind = """
from itertools import count
from threading import Event
import runtime.backends.triton.compiling as compiling

compiling.MOST, turns, stopped, build = 2, count(), Event(), add.compile

def first_alone(*source, **how):
    next(turns) and stopped.wait()
    return build(*source, **how)

def stop(done, total):
    stopped.set()
    raise KeyboardInterrupt

add.compile = first_alone
try:
    compile_together([lambda: [add[(1,)](x, N=n) for n in (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024)]], stop)
except KeyboardInterrupt:
    assert JITFunction.run is run and knobs.compilation.listener is None
    kept = [type(one).__name__ for one in add.device_caches[0][0].values()]
    assert set(kept) == {"CompiledKernel"} and len(kept) < 11, kept
else:
    raise AssertionError("went on")
"""
    together(tmp_path, "[[(add, 32)]]", behind)
