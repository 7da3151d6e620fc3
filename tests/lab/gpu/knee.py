"""Cost of dynamic compensation on top of the base product: time over k_chunk for several n_tb, normalized.

The base product runs on one stream, the fused compensation on another, as in a decoded token's graph. Weights and
activations are rotated, so that the channels that are fetched differ from launch to launch.

Source: QDEC §5.3, Fig. 17.
"""

from __future__ import annotations

from functools import partial

import torch

from runtime.backends.operations.channels import total_budget
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.select import Selection, make_selection
from tests.lab.gpu.clock import Launch, copies_past_cache, race
from tests.lab.gpu.layers import CompensatedLayer
from tests.lab.gpu.record import Part
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import RESIDUAL_BITS

REPEATS = 200
"""Launches whose results are compared bit by bit."""


def same_in_two_launches(layer: CompensatedLayer, selection: Selection, n_tb: int) -> bool:
    """Whether the fused launch gives the bits of two launches, some hundred times in a row."""
    x, expected = layer.rows[:1], torch.empty_like(layer.dec)
    compensate(x, selection, layer.residual, Output(expected), LaunchConfig(n_tb=n_tb, fused=False), layer.side_space)
    for _ in range(REPEATS if layer.on_gpu else 1):
        layer.dec.fill_(float("nan"))
        layer.compensation(n_tb, selection=selection)
        if not torch.equal(layer.dec, expected):
            return False
    return True


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each layer type, bit width, n_tb and k_chunk; `normalized` is by the base product alone."""
    for bits in sizes.bits:
        for kind, shape in sizes.shapes.items():
            if not part.begin({"kind": kind, "bits": bits}):
                continue
            copies = copies_past_cache(shape[0] * shape[1] * bits // 8, sizes.rotated_bytes)
            layer = CompensatedLayer(kind, shape, bits, sizes.knee_k_chunks[0], device, inputs=copies, weights=copies)
            for n_tb in sizes.knee_n_tbs:
                _curve(part, layer, n_tb, sizes, device)


def _curve(part: Part, layer: CompensatedLayer, n_tb: int, sizes: Sizes, device: torch.device) -> None:
    """The points of one curve, timed in turns with the base product; activations change with the weights."""
    packed, each = layer.packed, range(len(layer.weights))
    launches: dict[str, list[Launch]] = {"0": [partial(layer.product, copy, copy) for copy in each]}
    for k_chunk in sizes.knee_k_chunks:
        chosen = make_selection(packed, k_chunk=k_chunk, device=device)
        launches[str(k_chunk)] = [partial(layer.both, n_tb, copy=copy, row=copy, selection=chosen) for copy in each]
        if k_chunk == sizes.knee_k_chunks[-1]:
            point = {"kind": packed.name, "bits": packed.bits, "n_tb": n_tb, "k_chunk": k_chunk}
            part.add({"what": "check"} | point | {"correct": same_in_two_launches(layer, chosen, n_tb)})
    times = race(launches, device, rounds=max(1, sizes.rounds // 3))
    base = times["0"].p50
    N, K = packed.shape
    for k_chunk in (0, *sizes.knee_k_chunks):
        measured = times[str(k_chunk)]
        fetched = total_budget(K, k_chunk) * N * RESIDUAL_BITS / 8
        part.add(
            {"kind": packed.name, "bits": packed.bits, "n_tb": n_tb, "k_chunk": k_chunk}
            | measured.microseconds()
            | {"normalized": round(measured.p50 / base, 4), "fetched_gb_s": round(fetched / measured.p50 / 1e9, 2)}
        )
