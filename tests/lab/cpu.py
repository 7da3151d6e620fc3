"""CPU matrix products compared with the physical limit, for the shapes of a 1.1 B and an 8 B Llama.

    make bench                  or: python -m tests.lab.cpu --out FILE.json

One row a shape: the product of a low-bit matrix with one row of activations, in GB/s of weights and percent of the read
bandwidth measured in the same run; and with 128 rows, in 10⁹ operations a second. p20, p50 and p80 of the times.
Weights are uniform, or have a codebook for each output channel; they take turns, so a busy machine slows both alike.
The matrices of a run are rotated so that the last-level cache does not hold them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, CONTROL_WORDS, padded, parameters_of
from runtime.backends.cpu.link import link, most_scratch
from runtime.backends.cpu.pool import Pool, default_threads
from runtime.backends.cpu.tiles import aligned_zeros
from tests.lab.measure import in_turns
from tests.lab.store import about_run, columns, parser, write
from tuner.bandwidth import read_bandwidth

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
        weights: `uniform` in groups of 128, or `codebook`, one for each output channel.
    """

    def __init__(self, N: int, K: int, bits: int, rows: int, *, weights: str = "uniform") -> None:
        codebook = weights == "codebook"
        blocks, groups = K // BLOCK, K // BLOCK // GROUP_BLOCKS
        one = (N // 16) * blocks * BLOCK_BYTES[bits]
        copies = max(1, ROTATED_BYTES // one) if rows == 1 else 1
        rng = np.random.default_rng(0)
        self._codes = aligned_zeros((copies, one), np.uint8)
        self._codes[:] = np.frombuffer(rng.bytes(one), np.uint8)
        self._scales = aligned_zeros((N // 16, 1 if codebook else groups, 16), np.float16)
        self._zeros = aligned_zeros((N // 16, 0 if codebook else groups, 16), np.uint8)
        self._codebooks = aligned_zeros((N // 16, 16, 2**bits if codebook else 0), np.int8)
        self._x = aligned_zeros((rows + 16, K), np.int8)
        self._x_sums = aligned_zeros((rows + 16, groups), np.int32)
        self._x_scales = aligned_zeros((2, rows + 16, groups), np.float32)
        self._out = aligned_zeros((rows + 16, N), np.float32)
        self.bytes = one + self._scales.nbytes + self._zeros.nbytes + self._codebooks.nbytes
        self.operations = 2 * N * K * rows
        self.copies = copies
        self._control = aligned_zeros((CONTROL_WORDS,), np.int64)
        step = parameters_of(self._control)
        step["rows"] = rows
        books, form = (_address(self._codebooks), op.CODEBOOK) if codebook else (0, op.UNIFORM)
        program = aligned_zeros((copies, op.WIDTH), np.int64)
        x = op.Quantized(*map(_address, (self._x, *self._x_scales, self._x_sums)))
        out = op.Matrix(_address(self._out), self._out.strides[0])
        sizes = (bits, N // 16, blocks, groups, GROUP_BLOCKS)
        for words, codes in zip(program, self._codes, strict=True):
            of = op.Weights(_address(codes), _address(self._scales), _address(self._zeros), books, *sizes, 0, form)
            op.write(words, op.Linear(of, x, False, out, bias=0, accumulate=False))
        link(program, default_threads())
        self._scratch = aligned_zeros((default_threads(), padded(most_scratch(program), 64)), np.uint8)
        step["scratch"], step["scratch_stride"] = _address(self._scratch), self._scratch.strides[0]
        self._program = program
        self.pool = Pool(self._control, default_threads())

    def seconds(self) -> float:
        """Seconds of one product."""
        with self.pool.session():
            begin = time.perf_counter()
            self.pool.step(self._program)
            return (time.perf_counter() - begin) / self.copies


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def compare(name: str, N: int, K: int, bits: int, count: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure one shape with uniform weights and with codebooks. Returns a row for each."""
    products = {weights: Product(N, K, bits, count, weights=weights) for weights in WEIGHTS}
    times = in_turns({name: lambda p=product: p.seconds() for name, product in products.items()}, repetitions)
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
    return rows


def main() -> None:
    """Measure, print and store."""
    options = parser(__doc__, "cpu")
    options.add_argument("--repetitions", type=int, default=25)
    given = options.parse_args()
    rows = []
    for (name, (N, K)), bits, count in itertools.product(SHAPES.items(), (3, 4), (1, 128)):
        rows += compare(name, N, K, bits, count, given.repetitions if count == 1 else 5)
    print(columns(rows))
    write(given.out, {**about_run("python -m tests.lab.cpu"), "rows": rows})


if __name__ == "__main__":
    main()
