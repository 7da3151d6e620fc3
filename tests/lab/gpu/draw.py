"""Tokens drawn on the card from a whole vocabulary, in a graph, against the host's draws from the same stream."""

from __future__ import annotations

import time

import numpy as np
import torch

from runtime.backends.triton.sampling import draw
from runtime.text.sampling import Sampler, SamplingOptions
from tests.lab.gpu.clock import race
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes

_SEED = 5
_SAME = 0.98
"""Share of draws that must agree: a number may fall between two roundings of a sum."""
_WAYS = {
    "greedy": SamplingOptions(temperature=0),
    "temperature, top-p": SamplingOptions(temperature=0.8, top_p=0.95, seed=_SEED),
    "top-k, min-p": SamplingOptions(temperature=1.0, top_p=1.0, top_k=50, min_p=0.02, seed=_SEED),
}


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each way to draw."""
    V, draws = sizes.spec.vocab_size, 50 if device.type == "cuda" else 3
    rows = 3 * torch.randn(draws, V)
    logits, uniform = rows[0].to(device), torch.zeros(1, dtype=torch.float64, device=device)
    for how, options in _WAYS.items():
        sampler, stream = Sampler(options), np.random.Generator(np.random.PCG64(_SEED))
        same, seconds = 0, 0.0
        for row in rows:
            logits.copy_(row)
            uniform.fill_(stream.random())
            began = time.perf_counter()
            wanted = sampler.draw(row.numpy())
            seconds += time.perf_counter() - began
            same += int(draw(logits, options, uniform)) == wanted
        least = draws if how == "greedy" else _SAME * draws
        times = race({how: [lambda o=options: draw(logits, o, uniform)]}, device, rounds=sizes.rounds)[how]
        part.add(
            {"how": how, "draws": draws, "same": same, "correct": same >= least}
            | {"us": round(1e6 * times.p50, 1), "host_us": round(1e6 * seconds / draws, 1)}
        )
