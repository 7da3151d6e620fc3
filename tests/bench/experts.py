"""Decoding of a mixture of experts, or with states, with random weights, beside what reading them takes at least.

    python -m tests.bench.experts [--layers 6] [--bits 4] [--k-chunk 16] [--out FILE.json]
    python -m tests.bench.experts --states               blocks of Qwen3.5 4B, three of four with a delta rule
    python -m tests.bench.experts --shared               Gemma 4 E2B, whole: shared caches, embeddings by block

The mixture has 2048 channels and 64 experts of 768, 8 of them for a token, with fewer blocks than the 24 of the whole,
so that it fits a small machine. A turn is a few tokens without compensation, a few with it, and the read bandwidth of
the memory, and of each the fastest tenth counts. Beside it stands a plain model of the same code: dense, with about as
many weights as a token reads of a mixture's; or with attention in place of delta rules; or with caches and heads of its
own and no further embeddings. What it lacks of the limit is not the doing of experts, states or shared caches.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.spec import MixtureSpec, ModelSpec, RopeSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.measure.timing import undisturbed
from tests.bench.gpu.sizes import blocks
from tests.bench.reporting.run import about_run, write_report
from tests.peers.shape import RandomModel
from tuner.bandwidth import read_bandwidth

MIXTURE = MixtureSpec(experts=64, chosen=8, width=768, normalized=True)
"""Experts of each block."""
TURN = 4
"""Tokens of a turn."""


def shape(layers: int) -> ModelSpec:
    """The mixture with so many blocks; a small vocabulary, so that the head weighs as little as in the whole."""
    return ModelSpec(
        family="qwen3_moe",
        hidden_size=2048,
        intermediate_size=MIXTURE.chosen * MIXTURE.width,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=4096,
        max_context=2048,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=64),
        windows=(None,) * layers,
        mixture=MIXTURE,
    )


def with_states(layers: int) -> ModelSpec:
    """Blocks of Qwen3.5 4B."""
    return replace(blocks("Qwen3.5 4B", layers), max_context=2048, rope=RopeSpec(rotary_dim=64))


def with_shared_caches() -> ModelSpec:
    """Gemma 4 E2B with a small vocabulary."""
    ropes = {"rope": RopeSpec(rotary_dim=128), "window_rope": RopeSpec(rotary_dim=256)}
    return replace(blocks("Gemma 4 E2B", 35), max_context=2048, **ropes)


class Decoding:
    """A model, and the times of its tokens."""

    def __init__(self, spec: ModelSpec, bits: int, k_chunk: int) -> None:
        options = DecoderOptions(context=256, max_rows=16)
        self.decoder = CpuDecoder(RandomModel(spec, bits, residuals=k_chunk > 0), options)
        self.ways = {0: 0, k_chunk: k_chunk}
        self.times: dict[int, list[float]] = {way: [] for way in self.ways}
        self._position = -1

    def turn(self, k_chunk: int) -> None:
        """Time some tokens."""
        self.decoder.set_k_chunk(k_chunk)
        with self.decoder.session():
            for at in range(TURN + 1):
                position = self._position = (self._position + 1) % 200
                step = Step.of([7919 * position % 4096], position)
                begin = time.perf_counter()
                self.decoder.forward(step)
                if at:  # the first finds its program's data in no cache
                    self.times[k_chunk].append(time.perf_counter() - begin)


def main() -> None:
    """Measure, print the table, and write it down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--bits", type=int, default=4, choices=(3, 4))
    parser.add_argument("--k-chunk", type=int, default=16)
    parser.add_argument("--states", action="store_true", help="delta rules instead of experts")
    parser.add_argument("--shared", action="store_true", help="caches and embeddings of Gemma 4 E2B instead")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name, other, spec = "mixture", "dense", shape(arguments.layers)
    if arguments.states:
        name, other, spec = "states", "attention", with_states(arguments.layers)
    if arguments.shared:
        name, other, spec = "shared", "own", with_shared_caches()
    plain = replace(spec, mixture=None, mixers=(), delta=None, token_width=0, wide_heads=None, shared_width=None)
    kinds = {name: spec, other: plain}
    models = {name: Decoding(own, arguments.bits, arguments.k_chunk) for name, own in kinds.items()}
    reads: list[float] = []
    for _ in range(arguments.turns):
        reads.append(read_bandwidth(None, fresh=True).gb_s)
        for model in models.values():
            for way in model.ways:
                model.turn(way)
    fastest = float(np.quantile(reads, 0.9))
    rows: list[dict[str, Any]] = []
    print(f"read bandwidth {fastest:.1f} GB/s")
    for name, model in models.items():
        for way, times in model.times.items():
            own = undisturbed(times)
            limit = model.decoder.weight_bytes / fastest / 1e9
            rows.append(
                {
                    "model": name,
                    "k_chunk": way,
                    "ms": round(1e3 * own, 3),
                    "megabytes": round(model.decoder.weight_bytes / 1e6, 1),
                    "limit_ms": round(1e3 * limit, 3),
                    "percent_of_limit": round(100 * limit / own, 1),
                    "tokens": len(times),
                }
            )
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    about = about_run("python -m tests.bench.experts")
    write_report(arguments.out, {**about, "layers": arguments.layers, "bits": arguments.bits, "rows": rows})


if __name__ == "__main__":
    main()
