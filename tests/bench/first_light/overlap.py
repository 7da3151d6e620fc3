"""Overlap of a product and its compensation: the time of both by the longer of the two, in every arrangement."""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import torch

from tests.bench.first_light.layer import ORDERS, RESERVED, CompensatedLayer
from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.clock import copies_past_cache, race
from tests.bench.gpu.report import Part, Row

USED: Row = {"priority": "high", "reserved": "product, compensation", "order": "compensation first"}
"""The arrangement that the program uses, which is judged."""
_N_TBS = (4, 8)


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each layer type, n_tb, order, priority and request for shared memory, the program's own first.

    1.0 is perfect. Weights rotate through copies: they come from memory, as in a token, not from the cache.
    """
    ways = [(USED["priority"], RESERVED), ("high", RESERVED[:1]), ("high", ()), ("normal", RESERVED)]
    layers = {kind: _layer(kind, amount, device) for kind in amount.beside}
    n_tbs = [n for n in amount.n_tbs if n in _N_TBS] or amount.n_tbs[:1]
    for (priority, reserved), (kind, layer), n_tb in itertools.product(ways, layers.items(), n_tbs):
        where = {"kind": kind, "n_tb": n_tb, "priority": priority, "reserved": ", ".join(reserved)}
        if part.late():
            part.add({"what": "left out for want of time"} | where)
            continue
        layer.set_priority(priority)
        layer.reserve(reserved)
        each = range(len(layer.weights))
        launches = {"product": [partial(layer.product, copy) for copy in each]}
        launches |= {"compensation": [partial(layer.compensation, n_tb)]}
        launches |= {order: [partial(layer.both, n_tb, order, copy) for copy in each] for order in ORDERS}
        times = race(launches, device, rounds=amount.bench.rounds)
        layer.reserve(RESERVED)
        longer = max(times["product"].p50, times["compensation"].p50)
        for order in ORDERS:
            part.add(
                where
                | {"order": order, "both_us": round(1e6 * times[order].p50, 2)}
                | {f"{name}_us": round(1e6 * times[name].p50, 2) for name in ("product", "compensation")}
                | {"both_by_longer": round(times[order].p50 / longer, 3)}
            )
    own = [row["both_by_longer"] for row in part.rows if row.items() >= USED.items()]
    if own:
        median, most = statistics.median(own), amount.most_by_longer
        judged = {
            "what": "as the program launches them",
            "most": most,
            "both_by_longer_median": median,
        }
        part.add(judged | {"correct": median <= amount.most_by_longer})


def _layer(kind: str, amount: Amount, device: torch.device) -> CompensatedLayer:
    shape, bits = amount.bench.shapes[kind], amount.bench.bits[0]
    weights = copies_past_cache(shape[0] * shape[1] * bits // 8, amount.bench.rotated_bytes)
    return CompensatedLayer(kind, shape, bits, amount.k_chunk, device, weights=weights)
