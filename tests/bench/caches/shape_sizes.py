"""Sizes of the model shape on which decoding over long caches is timed; nothing is imported, for other interpreters."""

from __future__ import annotations

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 512, 1024, 8, 8, 2, 64, 2048
CONTEXT = 65536
"""Positions that it knows."""
BITS = 4


def described() -> dict[str, float]:
    """The sizes as GGUF's metadata holds them."""
    return {
        "context": CONTEXT,
        "hidden": HIDDEN,
        "layers": LAYERS,
        "intermediate": INTERMEDIATE,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocabulary": VOCABULARY,
    }
