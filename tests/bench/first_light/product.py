"""The product of one row with low-bit weights: microseconds, and percent of the bandwidth of reads."""

from __future__ import annotations

import torch

from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.bandwidth import read_gb_s
from tests.bench.gpu.clock import race
from tests.bench.gpu.gemv import _check, ours
from tests.bench.gpu.report import Part


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each layer type and width of a weight."""
    sizes = amount.bench
    limit = read_gb_s(sizes, device)
    part.add({"what": "read", "gb_s": limit})
    for bits in sizes.bits:
        _check(part, bits, sizes, device)
        for kind, shape in sizes.shapes.items():
            if part.late():
                part.add({"what": "left out for want of time", "kind": kind, "bits": bits})
                continue
            peer = ours(shape, bits, sizes, device)
            times = race({"ours": peer.launches}, device, rounds=sizes.rounds)["ours"]
            gb_s = peer.nbytes / times.p50 / 1e9
            row = {"kind": kind, "bits": bits, "us": round(1e6 * times.p50, 2), "gb_s": round(gb_s, 1)}
            part.add(row | {"percent_of_reads": round(100 * gb_s / limit, 1) if limit else None})
