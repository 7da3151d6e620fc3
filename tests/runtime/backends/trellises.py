"""Random matrices of trellises, as stored, and a mixture to quantize."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models import trellis
from models.packed import PackedLinear
from tests.models.conftest import write_tokenizer
from tests.models.random_models import MIXTURE, SIZES, random_model


def random_trellis(N: int, K: int, bits: int, *, seed: int, bias: bool = False) -> PackedLinear:
    """A matrix [N, K] of random codes."""
    rng = np.random.default_rng(seed)
    return PackedLinear(
        name="layers.0.o",
        shape=(N, K),
        bits=bits,
        group_size=64,
        codes=trellis.pack(rng.integers(0, 1 << bits, (N, trellis.padded_width(K))).astype(np.uint8), bits),
        scales=rng.uniform(1e-4, 1e-2, (N, 1)).astype(np.float16),
        zeros=None,
        trellis=True,
        bias=rng.normal(size=N).astype(np.float32) if bias else None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


def mixture(folder: Path) -> Path:
    """A Qwen2-MoE with a shared expert that counts as two of 96 channels."""
    sizes = {
        **MIXTURE,
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192,
    }
    random_model("Qwen2Moe", **sizes).save_pretrained(folder)
    write_tokenizer(folder, SIZES["vocab_size"])
    return folder
