"""Small random models of transformers, of every family that runs here."""

from __future__ import annotations

import math
import random
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
    "lfm2": (
        "Lfm2",
        {"norm_eps": 0.01, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-biases": (
        "Lfm2",
        {
            "norm_eps": 0.01,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 16,
            "tie_word_embeddings": False,
        },
    ),
    "seed-oss-biases": ("SeedOss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
}
"""Family and what is special, by a name."""


DRAWN_FAMILIES = ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Phi3", "SmolLM3", "Granite", "SeedOss", "Lfm2")
"""Families whose configurations `drawn_changes` draws."""


def drawn_changes(family: str, seed: int) -> dict[str, Any]:
    """A configuration of a family, drawn at random: layers, heads, odd sizes, windows and the family's own options."""
    generator = random.Random(f"{family} {seed}")
    kv_heads, layers, dim = generator.randint(1, 3), generator.randint(1, 5), 2 * generator.randint(2, 9)
    heads, window = kv_heads * generator.randint(1, 4), generator.choice([None, 1, 3, 8])

    def flag() -> bool:
        return generator.random() < 0.5

    mask = ["sliding_attention" if window and flag() else "full_attention" for _ in range(layers)]
    own: dict[str, dict[str, Any]] = {
        "Llama": {"attention_bias": flag(), "mlp_bias": flag()},
        "Mistral": {"sliding_window": window},
        "Ministral": {"sliding_window": window or 4, "layer_types": mask},
        "Qwen2": {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": mask},
        "Qwen3": {"use_sliding_window": False, "attention_bias": flag()},
        "Phi3": {"sliding_window": window, "partial_rotary_factor": 2 * generator.randint(1, dim // 2) / dim},
        "SmolLM3": {
            "no_rope_layers": [int(flag()) for _ in range(layers)],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "attention_bias": flag(),
        },
        # Scores stay moderate: with sharp ones the two orders of a float32 sum part by more than the tolerance.
        "Granite": {name: generator.uniform(0.1, 0.4 if name == "attention_multiplier" else 4) for name in GRANITE}
        | {"attention_bias": flag()},
        "SeedOss": {"attention_bias": flag(), "attention_out_bias": flag(), "mlp_bias": flag()},
        "Lfm2": {
            "layer_types": [generator.choice(["conv", "full_attention"]) for _ in range(layers)],
            "conv_L_cache": generator.randint(2, 5),
            "conv_bias": flag(),
            "block_auto_adjust_ff_dim": flag(),
            "block_multiple_of": generator.randint(1, 20),
            "block_ffn_dim_multiplier": generator.uniform(0.5, 2),
        },
    }
    # Heads of these are as wide as the hidden size says; the others take any width.
    divided = family in ("Qwen2", "Phi3", "SmolLM3", "Granite", "Lfm2")
    hidden = heads * dim if divided else heads * generator.randint(2, 20)
    width = {} if divided else {"head_dim": dim}
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": generator.randint(5, 90),
        "tie_word_embeddings": flag(),
        **width,
        **own[family],
    }


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
