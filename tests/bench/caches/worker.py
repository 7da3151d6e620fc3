"""This project's side of the timing, in a separate process: reads jobs from stdin, answers with times.

    python -m tests.bench.caches.worker TOKENS STEPS KIND ...

Loads the random model once for each kind of cache with TOKENS tokens in it and room for STEPS more. Each input line is
`KIND N`: N tokens are decoded one by one behind the TOKENS; the answer is a JSON line, a list of seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.kv.kinds import KINDS, KVKind
from runtime.measure.speed import fill
from tests.bench.caches.shape import slim
from tests.bench.caches.shape_sizes import BITS
from tests.peers.shape import RandomModel


@dataclass(frozen=True, slots=True)
class _Case:
    """A loaded model with a filled cache."""

    decoder: CpuDecoder
    tokens: int

    def decode(self, count: int) -> list[float]:
        """Seconds of each of so many tokens; the cache is as before afterwards, but for what was compressed."""
        times = []
        with self.decoder.session():
            for i in range(count):
                rows = np.array([self.tokens + i], np.int32)
                step = Step(tokens=rows % 97, slots=rows * 0, positions=rows, logit_rows=rows * 0)
                begin = time.perf_counter()
                self.decoder.forward(step)
                times.append(time.perf_counter() - begin)
        return times


def main() -> None:
    """Serve until stdin ends."""
    tokens, steps, *kinds = sys.argv[1:]
    model, cases = RandomModel(slim(), BITS, residuals=False), {}
    about: dict[str, Any] = {"version": importlib.metadata.version("lowbit-chat"), "kinds": {}}
    for name in kinds:
        kind: KVKind = KINDS[name].name  # type: ignore[index]
        decoder = CpuDecoder(model, DecoderOptions(kv=kind, context=int(tokens) + int(steps)))
        with decoder.session():
            fill(decoder, int(tokens))
        cases[name] = _Case(decoder, int(tokens))
        held = decoder.cache.slot_bytes(0)
        about |= {"threads": decoder.threads, "weight_bytes": decoder.weight_bytes}
        about["kinds"][name] = {"kv_bytes": held, "kv_bytes_per_token": round(held / int(tokens), 1)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        print(json.dumps(cases[name].decode(int(count))), flush=True)


if __name__ == "__main__":
    main()
