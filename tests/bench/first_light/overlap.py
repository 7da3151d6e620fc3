"""Overlap of a product and its compensation: the time of both by the longer of the two, in every arrangement."""

from __future__ import annotations

from functools import partial

import torch

from tests.bench.first_light.layer import ORDERS, PRIORITIES, CompensatedLayer
from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.clock import race
from tests.bench.gpu.report import Part


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each layer type, n_tb, order of capture and priority of the second stream; 1.0 is perfect."""
    for kind in amount.beside:
        layer = CompensatedLayer(kind, amount.bench.shapes[kind], amount.bench.bits[0], amount.k_chunk, device)
        for n_tb in (n for n in amount.n_tbs if n in (1, 4, 8)):
            for priority in PRIORITIES:
                if part.late():
                    part.add({"what": "left out for want of time", "kind": kind, "n_tb": n_tb})
                    continue
                layer.set_priority(priority)
                launches = {"product": [layer.product], "compensation": [partial(layer.compensation, n_tb)]}
                launches |= {order: [partial(layer.both, n_tb, order)] for order in ORDERS}
                times = race(launches, device, rounds=amount.bench.rounds)
                longer = max(times["product"].p50, times["compensation"].p50)
                for order in ORDERS:
                    part.add(
                        {"kind": kind, "n_tb": n_tb, "priority": priority, "order": order}
                        | {f"{name}_us": round(1e6 * times[name].p50, 2) for name in ("product", "compensation")}
                        | {"both_us": round(1e6 * times[order].p50, 2)}
                        | {"both_by_longer": round(times[order].p50 / longer, 3)}
                    )
