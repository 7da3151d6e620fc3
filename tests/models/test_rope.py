"""Rotary frequencies and tables against transformers' own, and against what the papers say of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from models.rope import frequencies, tables
from models.spec import RopeSpec
from tests.close import assert_close

PLAIN = RopeSpec(theta=10000.0, rotary_dim=64)
LLAMA3 = RopeSpec(theta=500000.0, rotary_dim=128, kind="llama3", factor=8.0, original_context=8192)
LONG = RopeSpec(
    theta=10000.0,
    rotary_dim=8,
    kind="longrope",
    original_context=100,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(2.0, 3.0, 4.0, 5.0),
    attention_factor=1.19,
)

CONFIGS: dict[str, tuple[RopeSpec, dict[str, Any]]] = {
    "default": (PLAIN, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (
        RopeSpec(theta=10000.0, rotary_dim=64, kind="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama3": (
        LLAMA3,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_equal_transformers(name: str) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope, parameters = CONFIGS[name]
    config = LlamaConfig(head_dim=rope.rotary_dim, rope_parameters=parameters, max_position_embeddings=8192)
    positions = 1000
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    ours = tables(rope, positions)
    half = rope.rotary_dim // 2
    # transformers multiplies in float32, so its angles are off by up to position * 2^-24.
    assert_close(ours[0], cos[0, :, :half].numpy(), "model")
    assert_close(ours[1], sin[0, :, :half].numpy(), "model")


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3, LONG], ids=["plain", "llama3", "longrope"])
def test_tables_have_the_documented_shape_and_begin_alike(rope: RopeSpec) -> None:
    longer = tables(rope, 90)
    for context in (1, 7):
        for table, whole in zip(tables(rope, context), longer, strict=True):
            assert table.shape == (context, rope.rotary_dim // 2)
            assert table.dtype == np.float32
            assert table.flags.c_contiguous
            np.testing.assert_array_equal(table, whole[:context])
    cos, sin = longer
    assert_close(cos[0], rope.attention_factor, "rounding")
    assert (sin[0] == 0).all()


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain = frequencies(RopeSpec(theta=LLAMA3.theta, rotary_dim=128), 1)
    ratio = frequencies(LLAMA3, 1) / plain
    wavelength = 2 * math.pi / plain
    assert_close(ratio[wavelength < 8192 / 4], 1.0, "rounding")
    assert_close(ratio[wavelength > 8192], 1 / 8, "rounding")
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) > 2
    assert (np.diff(ratio) <= 1e-12).all()


@pytest.mark.parametrize(
    ("context", "factors"), [(1, LONG.short_factor), (100, LONG.short_factor), (101, LONG.long_factor)]
)
def test_longrope_changes_factors_beyond_the_original_context(context: int, factors: tuple[float, ...]) -> None:
    expected = [10000.0 ** (-i / 4) / factor for i, factor in enumerate(factors)]
    assert_close(frequencies(LONG, context), expected, "float64")


def test_longrope_scales_cosines_and_sines() -> None:
    cos, sin = tables(LONG, 50)
    assert_close(np.hypot(cos, sin), 1.19, "rounding")
