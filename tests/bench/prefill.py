"""Prompts of W4A8 beside 4-bit weights whose activations have a scale for each group, and beside llama.cpp.

    python -m tests.bench.prefill NAME=FOLDER ... [--peer FILE.gguf --peer-python PYTHON] --out FILE

First the products alone, 1 to 512 rows, in turns: the time, and its share of the limit. That is the bytes of weights at
the read bandwidth, or the operations at the rate that the same byte dot products reach whose operands stay in
registers, whichever takes longer; both are measured in the same run, with all threads. Then the
time to the first token of prompts of 512 tokens, programs of their own in turns. On a processor with AMX every model
is timed with tile registers and without; elsewhere that line is left out, and why is said.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from runtime.backends.cpu.arena import aligned_zeros
from runtime.backends.cpu.kernels.gemm import CHAINS, no_sums
from runtime.backends.cpu.kernels.w4a8 import store_sums
from runtime.backends.cpu.machine.emit import BYTES, Builder, define, emit_dot4_entries, load, offset, words16
from runtime.backends.cpu.machine.isa import supported_variants
from runtime.backends.cpu.pool import default_threads
from tests.bench.cpu import Product
from tests.bench.reporting.run import about_run, write_report
from tests.bench.throughput import PROMPT, program
from tuner.bandwidth import read_bandwidth

SHAPES = {"SmolLM2 gate_up": (3072, 576), "SmolLM2 down": (576, 1536), "1.1B gate_up": (11264, 2048)}
ROWS = (1, 8, 64, 512)
WEIGHTS = ("uniform", "w4a8")
_SPINS, _TURNS = 1_000_000, 8
_SPIN_OPERATIONS = 2 * 64 * CHAINS * _TURNS
_SUMS = types.UniTuple(words16, CHAINS)


@define(_SUMS, _SUMS, types.int64)
def _multiply(b: Builder, sums: Any, operands: Any) -> Any:
    """Add byte dot products of two vectors of weights with two of activations, which stay in registers, to all sums."""
    weights, x = ([load(b, BYTES, offset(b, operands, 64 * i), 64) for i in pair] for pair in ((0, 1), (2, 3)))
    totals = [b.extract_value(sums, chain) for chain in range(CHAINS)]
    for turn in range(_TURNS):
        for chain in range(CHAINS):
            totals[chain] = emit_dot4_entries(b, totals[chain], weights[turn % 2], x[(turn + chain) % 2])
    for chain, total in enumerate(totals):
        sums = b.insert_value(sums, total, chain)
    return sums


@numba.njit(nogil=True)
def _spin(operands: int, out: int, count: int) -> None:
    """Multiply the same registers again and again."""
    sums = no_sums()
    for _ in range(count):
        sums = _multiply(sums, operands)
    store_sums(sums, out)


def dot_rate(threads: int) -> float:
    """Operations a second of byte dot products that find everything in registers, all threads together."""
    memory = aligned_zeros((threads, 2, 1024), np.uint8)
    places = [[int(part.ctypes.data) for part in own] for own in memory]
    _spin(*places[0], 1)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda own: _spin(*own, _SPINS), places))
            best = max(best, threads * _SPINS * _SPIN_OPERATIONS / (time.perf_counter() - begin))
    return best


def products(rounds: int) -> list[dict[str, Any]]:
    """Time the products, in turns."""
    found = []
    print(f"{'product':18}{'rows':>6}{'weights':>10}{'µs':>10}{'of the limit':>14}")
    for name, (N, K) in SHAPES.items():
        for rows in ROWS:
            own = {weights: Product(N, K, 4, rows, weights=weights) for weights in WEIGHTS}
            times: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
            limits: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
            for _ in range(rounds):
                rate, bandwidth = dot_rate(default_threads()), 1e9 * read_bandwidth(None, fresh=True).gb_s
                for weights, product in own.items():
                    times[weights] += product.seconds(5)
                    limits[weights].append(max(product.bytes / bandwidth, product.operations / rate))
            for weights in WEIGHTS:
                seconds, limit = statistics.median(times[weights]), statistics.median(limits[weights])
                row = {"product": name, "N": N, "K": K, "rows": rows, "weights": weights, "us": round(1e6 * seconds, 1)}
                found.append({**row, "percent_of_limit": round(100 * limit / seconds)})
                print(f"{name:18}{rows:6}{weights:>10}{1e6 * seconds:10.1f}{100 * limit / seconds:12.0f} %", flush=True)
    return found


def prefills(models: list[str], peer: tuple[str, str] | None, rounds: int) -> list[dict[str, Any]]:
    """Time prompts, in turns."""
    variants, ways = ["amx", "avx512"], []
    if "amx" not in supported_variants():
        print("with AMX: left out, for this processor or its kernel has no tile registers")
        variants = [""]
    for text in models:
        name, _, folder = text.partition("=")
        ways += [(f"{name}, {own}" if own else name, sys.executable, "ours", folder, own) for own in variants]
    if peer is not None:
        ways.append(("llama.cpp", peer[1], "llama", peer[0], ""))
    times: dict[str, list[float]] = {way[0]: [] for way in ways}
    with contextlib.ExitStack() as stack:
        turns = {
            name: stack.enter_context(program(python, kind, which, answer=1, variant=variant))
            for name, python, kind, which, variant in ways
        }
        for turn in turns.values():
            turn(1)
        for _ in range(rounds):
            for name, turn in turns.items():
                times[name].append(turn(1)[0])
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rows.append({"program": name, "ms": round(1e3 * middle, 1), "tokens_per_s": round(PROMPT / middle)})
        print(f"{name:40}{1e3 * middle:10.0f} ms{PROMPT / middle:10.0f} tokens/s")
    return rows


def main() -> None:
    """Measure, print, and write down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--peer", help="a GGUF file")
    parser.add_argument("--peer-python", help="a Python with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    peer = (asked.peer, asked.peer_python) if asked.peer and asked.peer_python else None
    result = {
        **about_run("python -m tests.bench.prefill"),
        "dot_products_gop_s": round(dot_rate(default_threads()) / 1e9),
        "products": products(asked.rounds),
        "prompt": PROMPT,
        "prefills": prefills(asked.models, peer, asked.rounds) if asked.models or peer else [],
    }
    print(f"byte dot products: {result['dot_products_gop_s']} GOP/s")
    write_report(asked.out, result)


if __name__ == "__main__":
    main()
