"""Small random models of transformers, of every family that runs here."""

from __future__ import annotations

import math
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.01,  # large enough to be seen in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.7}


def longrope(pairs: int, **more: float) -> dict[str, Any]:
    """Rotary parameters of Phi-3.5's kind for a head with `pairs` rotating pairs of channels."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
        **more,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16, "eos_token_id": [2, 5]}),
    "llama3.2": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-head-dim": ("Mistral", {"sliding_window": 4, "head_dim": 12}),
    "qwen2": ("Qwen2", {"sliding_window": 5}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-layer-types": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-window": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3-biases-tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 5}),
    "phi3-partial": ("Phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3.5-longrope": ("Phi3", {"rope_parameters": longrope(4), "original_max_position_embeddings": 16}),
    "phi4-mini": (
        "Phi3",
        {
            "head_dim": 16,
            "hidden_size": 64,
            "rope_parameters": longrope(6, partial_rotary_factor=0.75),
            "original_max_position_embeddings": 16,
            "sliding_window": 100,
        },
    ),
    "ministral": ("Ministral", {"sliding_window": 5, "head_dim": 12}),
    "ministral-layer-types": (
        "Ministral",
        {"sliding_window": 4, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
    ),
    "granite": ("Granite", GRANITE),
    "granite-tied": ("Granite", {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
}
"""Family and what is special, by a name."""


def random_model(family: str, *, seed: str = "", **changes: Any) -> Any:
    """A small model of transformers whose every parameter matters: biases and norms too are random.

    Args:
        family: As transformers begins its classes' names.
        seed: Of the weights; the family's name if empty.
        changes: Fields of the configuration other than `SIZES`.
    """
    import transformers

    torch.manual_seed(sum(map(ord, seed or family)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0.0, 0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[1]))
    return model


def random_case(case: str) -> Any:
    """The random model of one of `CASES`."""
    family, changes = CASES[case]
    return random_model(family, seed=case, **changes)
