"""The barrier of many blocks beside a product that fills the card, in a graph, thousands of times: the same bits?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.lab.gpu.layers import ORDERS, CompensatedLayer, Order
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes

_INPUTS = 4
_AT_ONCE = 250
"""Replays between two looks at the clock."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each layer type, n_tb and order of capture."""
    for kind in sizes.beside:
        layer = CompensatedLayer(kind, sizes.shapes[kind], sizes.bits[0], sizes.k_chunk, device, inputs=_INPUTS)
        for n_tb in sizes.n_tbs:
            for order in ORDERS:
                where = {"kind": kind, "n_tb": n_tb, "order": order}
                if not part.begin(where):
                    continue
                part.add(where | replayed(layer, n_tb, order, sizes.replays))


def replayed(layer: CompensatedLayer, n_tb: int, order: Order, replays: int) -> Row:
    """Replay a graph of both, with other activations each time, and count numbers that are not those of two launches.

    Returns:
        Columns: replays, wrong numbers, whether counters are back at zero, whether all is as it should be.
    """
    expected = []
    for row in range(len(layer.rows)):
        layer.put(row)
        layer.product()
        layer.compensation(n_tb, fused=False)
        expected.append(torch.cat([layer.out, layer.dec]))
    wrong = torch.zeros((), dtype=torch.int64, device=layer.device)
    layer.both(n_tb, order)
    run: Callable[[], object] = partial(layer.both, n_tb, order)
    if layer.on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            layer.both(n_tb, order)
        run = graph.replay
    for replay in range(replays):
        layer.put(replay % len(expected))
        layer.out.fill_(torch.nan)
        layer.dec.fill_(torch.nan)
        run()
        wrong += (torch.cat([layer.out, layer.dec]) != expected[replay % len(expected)]).sum()
        if replay % _AT_ONCE == 0 and layer.on_gpu:
            torch.cuda.synchronize()
    zero = not layer.side_space.counters(2).any() and not layer.main.counters(2).any()
    return {"replays": replays, "wrong": int(wrong), "counters_zero": bool(zero), "correct": int(wrong) == 0 and zero}
