"""CPU matrix products compared with the physical limit, for the shapes of a 1.1 B and an 8 B Llama.

    make bench                                   or: python -m tests.bench.cpu --out FILE.json

One row a shape: the product of a low-bit matrix with one row of activations, in GB/s of weights and percent of the read
bandwidth measured in the same run; and with 128 rows, in 10⁹ operations a second. p20, p50 and p80 of the times.
Weights are uniform, or have a codebook for each output channel; they take turns, so a busy machine slows both alike.
The matrices of a run are rotated so that the last-level cache does not hold them.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.arena import aligned_zeros
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.control import CONTROL_WORDS
from runtime.backends.cpu.data.sizes import BLOCK, BLOCK_BYTES
from runtime.backends.cpu.data.step import parameters_of
from runtime.backends.cpu.link import link, most_scratch
from runtime.backends.cpu.machine.isa import VARIANT
from runtime.backends.cpu.pool import Pool, default_threads
from runtime.backends.cpu.tiles import padded
from tuner.bandwidth import read_bandwidth
from tuner.detect import detect_cpu

SHAPES = {
    "1.1B qkv": (2560, 2048),
    "1.1B gate_up": (11264, 2048),
    "1.1B down": (2048, 5632),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
}
WEIGHTS = ("uniform", "codebook")
GROUP_BLOCKS = 4
ROTATED_BYTES = 256 << 20


class Product:
    """One matrix shape, in enough copies to outgrow the caches, as a program of LINEAR instructions.

    Args:
        N: Output channels, a multiple of 16.
        K: Input channels, a multiple of 128.
        bits: 3 or 4.
        rows: Rows of activations.
        weights: `uniform` in groups of 128; `codebook`, one for each output channel; or `w4a8`, whole numbers in groups
            of 128, times tokens with one scale each.
    """

    def __init__(self, N: int, K: int, bits: int, rows: int, *, weights: str = "uniform") -> None:
        codebook, whole = weights == "codebook", weights == "w4a8"
        blocks, groups = K // BLOCK, K // BLOCK // GROUP_BLOCKS
        one = (N // 16) * blocks * BLOCK_BYTES[bits]
        copies = max(1, ROTATED_BYTES // one) if rows == 1 else 1
        rng = np.random.default_rng(0)
        self._codes = aligned_zeros((copies, one), np.uint8)
        self._codes[:] = np.frombuffer(rng.bytes(one), np.uint8)
        self._scales = aligned_zeros((N // 16, 1 if codebook or whole else groups, 16), np.float16)
        self._zeros = aligned_zeros((N // 16, 0 if codebook else groups, 16), np.uint8)
        self._codebooks = aligned_zeros((N // 16, 16, 2**bits if codebook else 0), np.int8)
        self._group_scales = aligned_zeros((N // 16, groups if whole else 0, 16), np.uint8)
        self._x = aligned_zeros((rows + 16, K), np.int8)
        self._x_sums = aligned_zeros((rows + 16, groups), np.int32)
        self._x_scales = aligned_zeros((2, rows + 16, groups), np.float32)
        self._out = aligned_zeros((rows + 16, N), np.float32)
        self.bytes = one + self._scales.nbytes + self._zeros.nbytes + self._codebooks.nbytes
        self.bytes += self._group_scales.nbytes
        self.operations = 2 * N * K * rows
        self.copies = copies
        self._control = aligned_zeros((CONTROL_WORDS,), np.int64)
        step = parameters_of(self._control)
        step["rows"] = rows
        books = _address(self._codebooks) if codebook else 0
        program = aligned_zeros((copies, op.WIDTH), np.int64)
        x = op.Quantized(*map(_address, (self._x, *self._x_scales, self._x_sums)))
        scales = _address(self._group_scales) if whole else 0
        out = op.Matrix(_address(self._out), self._out.strides[0])
        sizes = (bits, N // 16, blocks, groups, GROUP_BLOCKS)
        for words, codes in zip(program, self._codes, strict=True):
            of = op.Weights(_address(codes), _address(self._scales), _address(self._zeros), books, *sizes, scales)
            op.write(words, op.Linear(of, x, False, out, bias=0, accumulate=False))
        link(program, default_threads())
        self._scratch = aligned_zeros((default_threads(), padded(most_scratch(program), 64)), np.uint8)
        step["scratch"], step["scratch_stride"] = _address(self._scratch), self._scratch.strides[0]
        self._program = program
        self.pool = Pool(self._control, default_threads())

    def seconds(self, repetitions: int) -> list[float]:
        """Seconds of one product, once for each repetition."""
        times = []
        with self.pool.session():
            self.pool.step(self._program)
            for _ in range(repetitions):
                begin = time.perf_counter()
                self.pool.step(self._program)
                times.append((time.perf_counter() - begin) / self.copies)
        return times


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def compare(name: str, N: int, K: int, bits: int, count: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure one shape with uniform weights and with codebooks, and print a line for each. Returns the rows."""
    products = {weights: Product(N, K, bits, count, weights=weights) for weights in WEIGHTS}
    times: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
    for _ in range(repetitions):
        for weights in WEIGHTS:
            times[weights] += products[weights].seconds(1)
    limit = read_bandwidth(None, fresh=True).gb_s if count == 1 else 0.0
    rows = []
    for weights, product in products.items():
        fifths = statistics.quantiles(times[weights], n=5)
        p20, p50, p80 = 1e6 * fifths[0], 1e6 * statistics.median(times[weights]), 1e6 * fifths[3]
        speed, operations = product.bytes / p50 / 1e3, product.operations / p50 / 1e3
        rows.append(
            {
                "shape": name,
                "N": N,
                "K": K,
                "bits": bits,
                "weights": weights,
                "rows": count,
                "p20_us": round(p20, 1),
                "p50_us": round(p50, 1),
                "p80_us": round(p80, 1),
                "gb_s": round(speed, 2),
                "percent_of_read_bandwidth": round(100 * speed / limit, 1) if limit else None,
                "gop_s": round(operations, 1),
            }
        )
        numbers = [p20, p50, p80, speed, 100 * speed / limit if limit else 0.0, operations]
        print(f"{name:14}{bits:6}{weights:>10}{count:6}" + "".join(f"{number:9.1f}" for number in numbers))
    return rows


def main() -> None:
    """Measure, print the table, and write it down where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    titles = ("p20 µs", "p50 µs", "p80 µs", "GB/s", "% limit", "GOP/s")
    print(f"{'shape':14}{'bits':>6}{'weights':>10}{'rows':>6}" + "".join(f"{title:>9}" for title in titles))
    for name, (N, K) in SHAPES.items():
        for bits in (3, 4):
            for count in (1, 128):
                rows += compare(name, N, K, bits, count, arguments.repetitions if count == 1 else 5)
    report = {
        "command": "python -m tests.bench.cpu",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "cpu": detect_cpu().name,
        "threads": default_threads(),
        "variant": VARIANT,
        "versions": {name: importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")},
        "rows": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
