"""Kernels compiled together for a card that is not there: a process of its own, as the interpreter compiles nothing.

Prints what came of each scenario by its name, or how it failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from runtime.backends.triton import warmup
from runtime.backends.triton.warmup import compile_together


class Driver:
    """One card, which can launch nothing."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 89, 32))


@triton.jit
def add(x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)


@triton.jit
def wrong(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.reshape(tl.arange(0, N), [N // 32, 32]))


x = torch.zeros(64, dtype=torch.int32)
run = JITFunction.run


def together(*steps: list[tuple[Any, int]]) -> dict[str, Any]:
    """What compiling the launches of steps said, and what the launches gave."""
    told, launched = list[Any](), list[Any]()
    launches = [lambda s=s: launched.append([kernel[(1,)](x, N=n) for kernel, n in s]) for s in steps]
    compiled = compile_together(launches, lambda *ready: told.append(ready))
    return {"compiled": compiled, "told": told, "launched": launched, "kept": kept(add)}


def kept(kernel: Any) -> list[str]:
    return [type(one).__name__ for one in kernel.device_caches[0][0].values()]


def once() -> dict[str, Any]:
    return together([(add, 32)], [(add, 64), (add, 128), (add, 64)], [(add, 128)])


def again() -> dict[str, Any]:
    """As in the next process, from Triton's cache."""
    add.device_caches.clear()
    return together([(add, 32)], [(add, 64)])


def refused() -> dict[str, Any]:
    found = together([(wrong, 16), (add, 256)], [(add, 64)])
    try:
        wrong[(1,)](x, N=16)
    except triton.compiler.errors.CompilationError as error:
        return {**found, "wrong": kept(wrong), "said": str(error)}
    raise AssertionError("launched")


def beside() -> bool:
    """Whether another thread's launch goes to the card, which refuses it."""
    elsewhere, launched = ThreadPoolExecutor(1), list[bool]()

    def launch(done: int, total: int) -> None:
        try:
            elsewhere.submit(lambda: add[(1,)](x, N=32)).result()
        except AttributeError:
            launched.append(True)

    return compile_together([lambda: add[(1,)](x, N=512)], launch) == 1 and launched == [True]


def stopped() -> dict[str, Any]:
    """Of ten kernels, two at a time, whoever waits stops all but the first to be compiled."""
    warmup.MOST, turns, released, build, before = 2, count(), Event(), add.compile, len(kept(add))

    def first_alone(*source: Any, **how: Any) -> Any:
        if next(turns):
            released.wait()
        return build(*source, **how)

    def stop(done: int, total: int) -> None:
        released.set()
        raise KeyboardInterrupt

    add.compile = first_alone
    sizes = [1, 2, 4, 8, 16, 1024, 2048, 4096, 8192, 16384]
    try:
        compile_together([lambda: [add[(1,)](x, N=n) for n in sizes]], stop)
    except KeyboardInterrupt:
        return {"new": len(kept(add)) - before, "kinds": sorted(set(kept(add)))}
    raise AssertionError("went on")


def main() -> None:
    driver.set_active(Driver())
    found: dict[str, Any] = {}
    for scenario in (once, again, refused, beside, stopped):
        try:
            found[scenario.__name__] = scenario()
            assert JITFunction.run is run
            assert knobs.compilation.listener is None
        except Exception:  # noqa: BLE001 - the test of the scenario shows it
            found[scenario.__name__] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
