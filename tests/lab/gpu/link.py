"""Bandwidth of the fetch from page-locked memory by number of blocks, compared with the copy engine's."""

from __future__ import annotations

from functools import partial

import torch

from runtime.backends.triton.card import host_to_device_gb_s
from tests.lab.gpu.clock import race
from tests.lab.gpu.layers import CompensatedLayer
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes

_ALL = 1024
_USUAL = 8
"""Blocks that should suffice: more would take them from the product."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """GB/s of the copy engine, and of fetches of all of a layer's residuals."""
    nbytes = 64 << 20 if device.type == "cuda" else 1 << 16
    copied, best = host_to_device_gb_s(device, nbytes=nbytes), 0.0
    part.add({"what": "copy engine", "gb_s": round(copied, 2)})
    layer = CompensatedLayer("o", sizes.shapes["o"], sizes.bits[0], _ALL, device)
    fetches = {str(n): [partial(layer.compensation, n, fused=False)] for n in sizes.n_tbs}
    for n_tb, times in race(fetches, device, rounds=max(1, sizes.rounds // 5)).items():
        gb_s = layer.residual.codes.nbytes / times.p50 / 1e9
        best = max(best, gb_s if int(n_tb) <= _USUAL else 0.0)
        part.add({"what": "zero-copy fetch", "n_tb": int(n_tb), "gb_s": round(gb_s, 2)})
    share = best / copied
    judged = {"what": "the fetch by the copy engine", "n_tb_most": _USUAL, "least": sizes.least_of_link}
    part.add(judged | {"share": round(share, 3), "correct": share >= sizes.least_of_link})
