"""Duration of steps with few rows: the last piece of a prompt, a short follow-up, verification of a draft.

    python -m tests.bench.steps --stored NAME=FOLDER [--rows 1 2 3 4 6 8 12 16 24 32]

One decoder, all ways in turns within a round: without compensation, each row by its own 16 and 64 channels of 1024 as
decoded tokens are, and as rows of a prompt with all residuals. Beside each time stands the limit: the bytes that such a
step has to read at the read bandwidth measured in the same run, or its operations at the rate that a product of 128
rows reaches in the same run, whichever takes longer. Attention and what lies between the products is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from models.spec import ModelSpec
from models.weights import Weights
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.compensation import CHUNK
from runtime.load.open import open_decoder
from runtime.measure.timing import undisturbed
from tests.bench.cpu import SHAPES, Product
from tests.bench.prompts import models
from tests.bench.reporting.run import about_run, write_report
from tuner.bandwidth import read_bandwidth

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_FIRST = 64
"""Position of a step's first row; the context is short, so that attention weighs little."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of compensating a step."""

    name: str
    """For people."""
    k_chunk: int
    """Of each row."""
    together: bool
    """Whether all residuals are shared by all rows instead."""


WAYS = (
    Way(name="plain", k_chunk=0, together=False),
    Way(name="rows 16", k_chunk=16, together=False),
    Way(name="rows 64", k_chunk=64, together=False),
    Way(name="all", k_chunk=64, together=True),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Steps of some rows, timed."""

    model: str
    """Name."""
    way: str
    """Of `WAYS`."""
    rows: int
    """M."""
    median_ms: float
    """Of all rounds."""
    undisturbed_ms: float
    """The fastest tenth takes at most this."""
    limit_ms: float
    """What bytes or operations take at least."""


def read_bytes(model: Weights, decoder: Decoder, way: Way) -> int:
    """Bytes of weights and residuals that a step has to read; salient channels as if all rows had the same."""
    total = decoder.weight_bytes
    for name in model.spec.linear_names():
        residual, (N, K) = model.linear(name).residual, model.spec.linear_shape(name)
        if residual is None:
            continue
        shared = way.together and name != "head"
        channels = K if shared else -(-way.k_chunk * K // CHUNK)
        total += channels * N * residual.bits // 8
    return total


def operations(spec: ModelSpec, way: Way, rows: int) -> int:
    """Multiplications and additions of a step's products; those with residuals count where all are used."""
    head = 2 * spec.vocab_size * spec.hidden_size
    sizes = [spec.linear_shape(name) for name in spec.linear_names() if name != "head"]
    return head + sum(2 * N * K * rows * (2 if way.together else 1) for N, K in sizes)


def step_of(decoder: Decoder, way: Way, rows: int) -> Step:
    """A step of some rows of slot 0, of which the last one's logits are wanted."""
    positions = np.arange(_FIRST, _FIRST + rows, dtype=np.int32)
    tokens = (7919 * positions + 17) % decoder.spec.vocab_size
    return Step.of(tokens, _FIRST, [rows - 1], prefill=way.together)


def measured(name: str, model: Weights, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Time steps of some sizes in every way, in turns."""
    context = min(256, model.spec.max_context)
    options = DecoderOptions(context=context, prompt_k_chunk=CHUNK, max_rows=max(64, *sizes))
    decoder = open_decoder(model, options, "cpu")[0]
    times: dict[tuple[Way, int], list[float]] = {(way, rows): [] for way in WAYS for rows in sizes}
    product = Product(*SHAPES["1.1B gate_up"], 4, 128)
    with decoder.session():
        decoder.forward(Step.of(range(_FIRST), 0, [0], compensate=False))
        for turn in range(rounds + 1):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                decoder.set_k_chunk(way.k_chunk)
                for rows in sizes:
                    step = step_of(decoder, way, rows)
                    began = time.perf_counter()
                    decoder.forward(step)
                    if turn:
                        times[way, rows].append(1e3 * (time.perf_counter() - began))
    bandwidth = read_bandwidth(None, fresh=True).gb_s
    rate = product.operations / statistics.median(product.seconds(5)) / 1e9
    print(f"{name}: {bandwidth:.0f} GB/s, {rate:.0f} GOP/s")
    rows_of: list[Row] = []
    for (way, rows), own in times.items():
        reading = read_bytes(model, decoder, way) / bandwidth / 1e6
        adding = operations(model.spec, way, rows) / rate / 1e6
        rows_of.append(
            Row(
                model=name,
                way=way.name,
                rows=rows,
                median_ms=statistics.median(own),
                undisturbed_ms=undisturbed(own),
                limit_ms=max(reading, adding),
            )
        )
    decoder.close()
    return rows_of


def main() -> None:
    """Measure, print a table, and write the rows down where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--shape-bits", nargs="*", type=int, default=[], help="of the 1.1-billion shape; none: not it")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: list[Row] = []
    for name, model in models(asked.stored, asked.shape_bits):
        rows = measured(name, model, asked.rows, asked.rounds)
        print(f"{'rows':>6}" + "".join(f"{way.name:>24}" for way in WAYS) + "   ms: median, fastest tenth, limit")
        for size in asked.rows:
            own = [row for row in rows if row.rows == size]
            print(
                f"{size:6}"
                + "".join(f"{row.median_ms:10.2f}{row.undisturbed_ms:7.2f}{row.limit_ms:7.2f}" for row in own),
                flush=True,
            )
        found += rows
    if asked.out:
        report = {"about": about_run("python -m tests.bench.steps"), "rows": [asdict(row) for row in found]}
        write_report(asked.out, report)


if __name__ == "__main__":
    main()
