"""On a card: the barrier of many blocks beside a product that fills it, in a graph; a decoder with many blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.triton.decoder import TritonDecoder

pytestmark = pytest.mark.gpu

WIDE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 2, "num_heads": 16, "num_kv_heads": 4,
    "head_dim": 128, "vocab_size": 4096, "max_context": 1024,
}  # fmt: skip
"""Wide enough for many blocks: gate and up have 64 lines of residuals."""
N_TB = {"qkv": 8, "o": 8, "gate_up": 24, "down": 8, "head": 8}


@pytest.mark.parametrize("order", ["compensation first", "product first"])
@pytest.mark.parametrize("n_tb", [4, 8, 24])
def test_many_blocks_wait_for_each_other_beside_a_product(cuda: str, n_tb: int, order: Any) -> None:
    from tests.bench.first_light.graph import replayed
    from tests.bench.first_light.layer import CompensatedLayer

    layer = CompensatedLayer("gate_up", (28672, 4096), 4, 16, torch.device(cuda), inputs=4)
    assert replayed(layer, n_tb, order, 500)["correct"]


def test_a_decoder_with_many_blocks_replays_what_it_launches(cuda: str, tiny_model: Any, tiny_spec: Any) -> None:
    model = tiny_model(tiny_spec(**WIDE), bits=4, residual_bits=4)
    options = DecoderOptions(context=1024, max_rows=8, k_chunk=32, n_tb=N_TB)
    captured, launched = (TritonDecoder(model, options, cuda) for _ in range(2))
    blocks = {linear.n_tb for linear in captured.model.linears.values()}
    assert max(blocks) >= 16
    assert min(blocks) > 1
    for position in range(200):
        values = {"tokens": [(7 * position) % 4096], "slots": [0], "positions": [position], "logit_rows": [0]}
        step = Step(**{name: np.array(value, np.int32) for name, value in values.items()})
        found = np.array(captured.forward(step))
        assert np.array_equal(found, launched.start(step).cpu().numpy()), position
