"""The rates of quantizing, on a shape that takes seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.bench.rates import SHAPE, of_shape, table, weights_of
from tests.peers.shape import llama_1b


def test_a_shape_is_timed_by_its_blocks(tmp_path: Path) -> None:
    layers = 4
    spec = replace(
        llama_1b(), hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=2048
    )
    spec = replace(spec, num_layers=layers, windows=(None,) * layers)
    rate = of_shape(spec, "rtn", 3, (1, 2), tmp_path)
    assert rate.model == SHAPE
    assert rate.weights == weights_of(spec) == layers * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96) + 2048 * 64
    assert rate.peak_bytes > 0
    assert SHAPE in table([rate])
