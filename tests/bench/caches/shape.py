"""The model shape for timing decoding over long caches: few weights to read besides the cache, and random ones."""

from __future__ import annotations

from models.spec import ModelSpec, RopeSpec
from tests.bench.caches.shape_sizes import CONTEXT, HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, VOCABULARY


def slim() -> ModelSpec:
    """A Llama shape of 20 million parameters whose cache of 32768 tokens holds 13 times the bytes of its weights."""
    return ModelSpec(
        family="llama",
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_context=CONTEXT,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=HEAD_DIM),
        windows=(None,) * LAYERS,
    )
