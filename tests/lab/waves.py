"""What equal shares of a product could gain over the best division of `gemv.configure`, simulated.

    python -m tests.lab.waves

Programs are fluid: they take places in their order, begin after `gemv.OVERHEAD` blocks' time, and take a block of codes
in 3 µs at best (`gemv.BUSY`), all together no more than the memory gives. What shares of parts of two output blocks
cost beyond that is left out, so gains are the most that can be expected.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from runtime.backends.triton.kernels.codes import Form
from runtime.backends.triton.kernels.gemv import OVERHEAD, configure, resident
from runtime.backends.triton.sizes import BLOCK
from tests.lab.kernels import LAPTOPS
from tests.lab.store import table
from tuner.devices import DEVICES

BLOCK_US = 3.0
"""Microseconds of a program for a block, as an H200 showed."""
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Llama 3 8B's."""
READ = 0.9
"""Share of a memory's speed that reads reach."""
CARDS = (
    *((DEVICES[name].name, 8, DEVICES[name].sm_count, READ * DEVICES[name].memory_gb_s) for name in LAPTOPS),
    ("NVIDIA H200", 9, 132, 4213),
)
"""Name, major compute capability, multiprocessors, and GB/s of reads, of the H200 as measured."""


def microseconds(blocks: Sequence[int], places: int, per_us: float) -> float:
    """Time of programs of so many blocks each, in their order, where `per_us` blocks a µs come from memory."""
    now, free, following = 0.0, places, 0
    beginning, active = list[tuple[float, int]](), list[float]()
    while following < len(blocks) or beginning or active:
        while free and following < len(blocks):
            heapq.heappush(beginning, (now + OVERHEAD * BLOCK_US, blocks[following]))
            free, following = free - 1, following + 1
        rate = min(1 / BLOCK_US, per_us / max(1, len(active)))
        step = min(min(active, default=math.inf) / rate, beginning[0][0] - now if beginning else math.inf)
        now += step
        left = [rest - rate * step for rest in active]
        active = [rest for rest in left if rest > 1e-6]
        free += len(left) - len(active)
        while beginning and beginning[0][0] <= now + 1e-9:
            active.append(heapq.heappop(beginning)[1])
    return now


def equal(blocks: int, places: int, per_us: float) -> float:
    """The same of equal shares of all blocks, the best of one to four waves."""
    times = []
    for programs in range(places, min(4 * places, blocks) + 1, places):
        each, more = divmod(blocks, programs)
        times.append(microseconds([each + 1] * more + [each] * (programs - more), places, per_us))
    return min(times, default=math.inf)


def main() -> None:
    """Simulate and print: microseconds of each matrix now, with equal shares, and by memory alone."""
    rows = []
    for name, major, multiprocessors, gb_s in CARDS:
        for bits in (3, 4):
            form = Form(GROUP_SIZE=128, BITS=bits, KIND="uniform", SPAN=128, EVEN_K=True, TAIL=0)
            held = resident(1, form, major)
            per_us, cells = gb_s * 1e3 / (64 * BLOCK * bits / 8), list[str]()
            before = after = 0.0
            for N, K in SHAPES.values():
                across, deep, places = -(-N // 64), -(-K // BLOCK), multiprocessors * held
                split = configure(N, K, multiprocessors, held).split
                each = -(-deep // split)
                parts = [min(each, deep - first) for first in range(0, deep, each)]
                now = microseconds([part for part in parts for _ in range(across)], places, per_us)
                then = min(now, equal(across * deep, places, per_us))
                before, after = before + now, after + then
                cells.append(f"{now:.0f}, {then:.0f}, {across * deep / per_us:.0f}")
            rows.append((name, bits, *cells, f"{100 * (before / after - 1):.1f}"))
    print(table(("card", "bits", *SHAPES, "gain, %"), rows))


if __name__ == "__main__":
    main()
