"""Overlap of a product and its compensation: the time of both by the longer of the two, in every arrangement."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from tests.lab.gpu.clock import copies_past_cache, race
from tests.lab.gpu.layers import ORDERS, RESERVED, CompensatedLayer
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes

USED: Row = {"priority": "high", "reserved": "product, compensation", "order": "one launch"}
"""The arrangement that the program uses, which is judged."""
_N_TBS = (4, 8)


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each layer type, n_tb, order, priority and request for shared memory, the program's own first.

    1.0 is perfect. Weights rotate through copies: they come from memory, as in a token, not from the cache.
    """
    ways = [(USED["priority"], RESERVED), ("high", RESERVED[:1]), ("high", ()), ("normal", RESERVED)]
    layers = {kind: _layer(kind, sizes, device) for kind in sizes.beside}
    n_tbs = [n for n in sizes.n_tbs if n in _N_TBS] or sizes.n_tbs[:1]
    for (priority, reserved), (kind, layer), n_tb in itertools.product(ways, layers.items(), n_tbs):
        where = {"kind": kind, "n_tb": n_tb, "priority": priority, "reserved": ", ".join(reserved)}
        if not part.begin(where):
            continue
        layer.set_priority(priority)
        layer.reserve(reserved)
        each = range(len(layer.weights))
        launches = {"product": [partial(layer.product, copy) for copy in each]}
        launches |= {"compensation": [partial(layer.compensation, n_tb)]}
        launches |= {order: [partial(layer.both, n_tb, order, copy) for copy in each] for order in ORDERS}
        times = race(launches, device, rounds=sizes.rounds)
        layer.reserve(RESERVED)
        longer = max(times["product"].p50, times["compensation"].p50)
        for order in ORDERS:
            part.add(
                where
                | {"order": order, "both_us": round(1e6 * times[order].p50, 2)}
                | {f"{name}_us": round(1e6 * times[name].p50, 2) for name in ("product", "compensation")}
                | {"both_by_longer": round(times[order].p50 / longer, 3)}
            )
    own = [row for row in part.rows if row.items() >= USED.items()]
    if own:
        part.add(judge(own, sizes.most_by_longer))


def judge(own: Sequence[Row], most: float) -> Row:
    """The verdict on rows of the program's own arrangement, where a product can hide the compensation.

    Where it can in none of them, the overlap was not shown, which is no pass.
    """
    hidden = [row["both_by_longer"] for row in own if row["compensation_us"] <= row["product_us"]]
    median = statistics.median(hidden) if hidden else None
    row: Row = {"what": "as the program launches them", "most": most, "of": len(own)}
    row |= {"compensation_is_shorter": len(hidden), "both_by_longer_median": median}
    return row | {"correct": (math.inf if median is None else median) <= most}


def _layer(kind: str, sizes: Sizes, device: torch.device) -> CompensatedLayer:
    shape, bits = sizes.shapes[kind], sizes.bits[0]
    weights = copies_past_cache(shape[0] * shape[1] * bits // 8, sizes.rotated_bytes)
    return CompensatedLayer(kind, shape, bits, sizes.k_chunk, device, weights=weights)
