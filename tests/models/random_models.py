"""Small random models of transformers, of every family that runs here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
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
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL3 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "beta_fast": 4.0}
LAYERED_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 12}
GEMMA4 = {"sliding_window": 5, "head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 4}
OF_GEMMA4 = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
VALUES_OF_GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 1.5,
}
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12}
GEMMA3N = {
    "sliding_window": 5,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": [48, 40, 48, 36],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 61,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.3, 0.0, 0.5],
    "final_logit_softcapping": 2.0,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
OF_DELTA = {"num_hidden_layers": 2, **{key: size for key, size in DELTA.items() if key != "head_dim"}}
NO_ROPE = {"rope_type": "default", "rope_theta": None}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.7}
DELTA_FIRST = ["linear_attention", "full_attention", "linear_attention"]
GRANITE4 = {
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 1,
}
GRANITE4_H = {
    **GRANITE,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "hidden_size": 48,
}
NEMOTRON = {
    "head_dim": 12,
    "layer_norm_epsilon": 0.01,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "time_step_min": 1e-30,  # transformers raises steps below it, against time_step_limit
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 40,
}
FALCON = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "embedding_multiplier": 3.0,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.3,
    "ssm_multipliers": [0.8, 1.2, 0.7, 0.9, 1.1],
    "mlp_multipliers": [1.4, 0.8],
    "lm_head_multiplier": 0.9,
}
OF_LAGUNA = {
    "head_dim": 16,
    "sliding_window": 5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 40,
    "moe_routed_scaling_factor": 1.8,
}
OF_LFM3 = {"norm_eps": 0.01, "head_dim": 16, "sliding_window": 5}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "decoder_sparse_step": 2}

OF_LATENTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": None,
}
"""With heads of 32 channels."""

SIGMOIDS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}


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
    "qwen2-layer-types": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}),
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
    "granite4": ("GraniteMoeHybrid", {**GRANITE, **GRANITE4, "position_embedding_type": "rope"}),
    "granite4-plain": ("GraniteMoeHybrid", {**GRANITE, **GRANITE4, "attention_bias": True}),
    "granite4-h": ("GraniteMoeHybrid", {**GRANITE4_H, "num_local_experts": 0, "mamba_proj_bias": True}),
    "granite4-h-moe": (
        "GraniteMoeHybrid",
        {**GRANITE4_H, "num_local_experts": 4, "intermediate_size": 20, "mamba_conv_bias": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5, "head_dim": 12},
    ),
    "qwen3-moe": ("Qwen3Moe", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        {**MIXTURE, "mlp_only_layers": [1], "decoder_sparse_step": 1, "attention_bias": True},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "head_dim": 16, "swiglu_limit": 0.7},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {**MIXTURE, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "granite-moe": (
        "GraniteMoe",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    "glm4-moe": ("Glm4Moe", {**SIGMOIDS, "n_shared_experts": 2, "use_qk_norm": True, "routed_scaling_factor": 1.8}),
    "glm4-moe-biases": (
        "Glm4Moe",
        {**SIGMOIDS, "head_dim": 12, "first_k_dense_replace": 0, "norm_topk_prob": False, "attention_bias": True},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **OF_LATENTS,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7},
        },
    ),
    "glm4-flash": ("Glm4MoeLite", {**OF_LATENTS, "q_lora_rank": 20, "tie_word_embeddings": True}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_layer_interval": 2, "head_dim": 12},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "qwen3.5": ("Qwen3_5", {**DELTA, "layer_types": DELTA_FIRST}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**DELTA, **MIXTURE, "layer_types": DELTA_FIRST, "shared_expert_intermediate_size": 20},
    ),
    "qwen3.5-biases": (
        "Qwen3_5",
        {
            **DELTA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "attention_bias": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
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
    "lfm3": (
        "Lfm3",
        {
            **OF_LFM3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "lfm3-biases": (
        "Lfm3",
        {
            **OF_LFM3,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-plain": ("Lfm3", {**OF_LFM3, "layer_types": MIXED, "use_attention_gate": False}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-biases": ("Gemma", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {**GEMMA, **CAPS, "layer_types": MIXED, "tie_word_embeddings": True}),
    "gemma2-uncapped": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": MIXED, "rope_parameters": LAYERED_ROPE}),
    "gemma3-untied": ("Gemma3", {**GEMMA, "sliding_window_pattern": 2, "tie_word_embeddings": False}),
    "gemma4-shared": (
        "Gemma4",
        {**GEMMA4, **SHARING, "vocab_size_per_layer_input": 67, "layer_types": [*MIXED[:2], *MIXED[:2]]},
    ),
    "gemma4-values": ("Gemma4", {**GEMMA4, **VALUES_OF_GEMMA4, "layer_types": [*MIXED[:2], *MIXED[:2]]}),
    "gemma4-experts": (
        "Gemma4",
        {**GEMMA4, **OF_GEMMA4, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2, "layer_types": MIXED[:2]},
    ),
    "gemma3n": ("Gemma3n", {**GEMMA3N, "layer_types": [*MIXED[:2], *MIXED[:2]], "rope_parameters": LAYERED_ROPE}),
    "gemma3n-streams": (
        "Gemma3n",
        {
            **GEMMA3N,
            "num_hidden_layers": 3,
            "layer_types": MIXED,
            "intermediate_size": 48,
            "activation_sparsity_pattern": None,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "vocab_size_per_layer_input": 67,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {**GEMMA4, "num_hidden_layers": 3, "layer_types": [*MIXED[:2], MIXED[1]], "final_logit_softcapping": 1.5},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": MIXED, "head_dim": 12}),
    "exaone4-whole": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4-plain": ("Glm4", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3}),
    "mistral-yarn": ("Mistral", {"sliding_window": None, "head_dim": 16, "rope_parameters": YARN}),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 3.0, "factor": 1.0}},
    ),
    "hunyuan-biases": (
        "HunYuanDenseV1",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {
            "head_dim": 16,
            "num_experts": 5,
            "moe_topk": [2, 2, 2],
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 3.0, "factor": 1.0},
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "norm_eps": 0.01,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **MIXTURE, "shared_expert_intermediate_size": 20, "layer_types": DELTA_FIRST},
    ),
    "olmo-hybrid": ("OlmoHybrid", {**OF_DELTA, "layer_types": DELTA_FIRST[:2], "rope_parameters": NO_ROPE}),
    "olmo-hybrid-turning": (
        "OlmoHybrid",
        {
            **OF_DELTA,
            "layer_types": DELTA_FIRST[1:],
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "muse-glimmer": (
        "MuseGlimmer",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": MIXED,
            "post_norm_eps": 0.1,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 2.0,
        },
    ),
    "ernie": ("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": True}),
    "ernie-biases": ("Ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False}),
    "nemotron-h": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "routed_scaling_factor": 1.8,
            "use_conv_bias": False,
        },
    ),
    "falcon-h1": ("FalconH1", {**FALCON, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    "falcon-h1-norms": ("FalconH1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "laguna": (
        "Laguna",
        {
            **OF_LAGUNA,
            "layer_types": MIXED,
            "num_attention_heads_per_layer": [4, 2, 6],
            "rope_parameters": {**LAYERED_ROPE, "full_attention": {**YARN, "partial_rotary_factor": 0.5}},
        },
    ),
    "laguna-channels": ("Laguna", {**OF_LAGUNA, "gating": "per-element"}),
    "cohere": ("Cohere", {"attention_bias": True, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2",
        {"layer_norm_eps": 0.01, "sliding_window": 5, "layer_types": MIXED, "logit_scale": 0.5},
    ),
    "arcee": ("Arcee", {"head_dim": 12, "mlp_bias": True}),
    "apertus": ("Apertus", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
}
"""Family and what is special, by a name."""
MECHANISMS = frozenset(
    {
        *("llama3.2", "phi3.5-longrope", "qwen2-window", "mistral-window", "granite", "gemma2", "olmo2", "hunyuan"),
        *("qwen3-moe-dense", "gpt-oss", "glm4-moe", "gemma4-shared", "gemma4-experts", "lfm2", "qwen3.5-moe"),
        *(
            "gemma3n",
            "granite4-h-moe",
            "glm4-flash",
            "apertus",
            "cohere2",
            "nemotron-h-moe",
            "falcon-h1",
            "olmo-hybrid",
        ),
    }
)
"""Those that have norms, rotary embeddings, windows, experts, states and shared caches of each kind.

`make test` runs tests of what holds for any family with them, and `make test-all` with all `CASES`."""


MIXTURES = (
    *("Mixtral", "GptOss", "Qwen2Moe", "Qwen3Moe", "Qwen3_5Moe", "GraniteMoe", "GraniteMoeShared", "Olmoe"),
    *("Glm4Moe", "Ernie4_5_Moe", "Lfm2Moe", "Qwen3Next", "HunYuanMoEV1", "DeepseekV2", "Glm4MoeLite"),
    *("NemotronH", "Laguna"),
)
"""Families with experts."""
DRAWN_FAMILIES = (
    *("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Phi3", "SmolLM3", "Granite", "SeedOss", "Lfm2", "Qwen3_5"),
    *("Gemma", "Gemma2", "Gemma3", "Gemma4", "Gemma4Unified", "Olmo2", "Olmo3", "Exaone4", "Glm4", "Ministral3"),
    *("HunYuanDenseV1", "GraniteMoeHybrid", "Ernie4_5", "Arcee", "Apertus", "Cohere", "Cohere2", "FalconH1", *MIXTURES),
    *("OlmoHybrid", "MuseGlimmer", "Gemma3n", "Lfm3"),
)
"""Families whose configurations `drawn_changes` draws."""


def _drawn_rope(generator: random.Random) -> dict[str, Any]:
    """A rotary embedding of some kind."""
    theta = generator.choice([50.0, 1e4, 1e6])
    scaled = [{**YARN, "beta_fast": generator.choice([2.0, 32.0])}, {"rope_type": "linear", "factor": 3.0}]
    return {**generator.choice([{"rope_type": "default"}, *scaled]), "rope_theta": theta}


def _drawn_share(generator: random.Random, dim: int) -> dict[str, Any]:
    """One of a share of all pairs of channels."""
    return {
        "rope_type": "proportional",
        "rope_theta": generator.choice([50.0, 1e4]),
        "partial_rotary_factor": generator.uniform(2 / dim, 1),
    }


def _drawn_gemma(generator: random.Random, window: int, mask: list[str]) -> dict[str, Any]:
    return {
        "sliding_window": window,
        "layer_types": mask,
        "query_pre_attn_scalar": generator.randint(4, 60),
        "final_logit_softcapping": generator.choice([None, 2.0]),
    }


def _drawn_gemma4(generator: random.Random, window: int, mask: list[str], dim: int) -> dict[str, Any]:
    mask = [*mask[:-1], "full_attention"]
    fewest = max(mask.index(kind) for kind in set(mask)) + 1  # so many blocks keep a cache of each kind
    tokens = generator.choice([0, 5, 16])
    wide = 2 * generator.randint(2, 12)
    return {
        "sliding_window": window,
        "layer_types": mask,
        "global_head_dim": wide,
        "attention_k_eq_v": generator.random() < 0.5,
        "num_global_key_value_heads": generator.choice([None, 1]),
        # transformers takes caches that are shared only with embeddings of each block's own.
        "num_kv_shared_layers": generator.randint(0, len(mask) - fewest) if tokens else 0,
        "use_double_wide_mlp": generator.random() < 0.5,
        "hidden_size_per_layer_input": tokens,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "attention_bias": generator.random() < 0.5,
        "enable_moe_block": generator.random() < 0.4,
        "num_experts": (experts := generator.randint(1, 7)),
        "top_k_experts": generator.randint(1, experts),
        "moe_intermediate_size": generator.randint(3, 40),
        "final_logit_softcapping": generator.choice([None, 2.0]),
        "rope_parameters": {
            "full_attention": _drawn_share(generator, wide),
            "sliding_attention": _drawn_rope(generator),
        },
    }


def _drawn_gemma3n(generator: random.Random, window: int, mask: list[str], _dim: int) -> dict[str, Any]:
    fewest = max(mask.index(kind) for kind in set(mask)) + 1  # so many blocks keep a cache of each kind
    return {
        "sliding_window": window,
        "layer_types": mask,
        "intermediate_size": [generator.randint(5, 90) for _ in mask],
        "num_kv_shared_layers": generator.randint(0, len(mask) - fewest),
        "hidden_size_per_layer_input": generator.randint(3, 20),
        "vocab_size_per_layer_input": generator.randint(20, SIZES["vocab_size"]),
        "altup_num_inputs": generator.randint(2, 5),
        "laurel_rank": generator.randint(1, 20),
        "activation_sparsity_pattern": [generator.choice([0.0, generator.uniform(0.1, 0.97)]) for _ in mask],
        "attention_bias": generator.random() < 0.5,
        "final_logit_softcapping": generator.choice([2.0, 30.0]),
        "rope_parameters": {"full_attention": _drawn_rope(generator), "sliding_attention": _drawn_rope(generator)},
    }


def _drawn_latents(own: random.Random) -> dict[str, Any]:
    return {
        "kv_lora_rank": 2 * own.randint(2, 20),  # even, as this and the next for transformers
        "qk_nope_head_dim": 2 * own.randint(1, 10),
        "qk_rope_head_dim": 2 * own.randint(1, 9),
        "v_head_dim": own.randint(1, 20),
        "q_lora_rank": own.choice([None, own.randint(3, 40)]),
        "n_routed_experts": (experts := own.randint(2, 9)),
        "num_experts_per_tok": own.randint(1, experts),
        "moe_intermediate_size": own.randint(3, 40),
        "n_shared_experts": own.randint(1, 3),
        "routed_scaling_factor": own.uniform(0.5, 2),
    }


def _drawn_delta(own: random.Random, mask: list[str]) -> dict[str, Any]:
    return {
        "layer_types": [own.choice(["linear_attention", "full_attention"]) for _ in mask],
        "linear_num_key_heads": (key_heads := own.randint(1, 3)),
        "linear_num_value_heads": key_heads * own.randint(1, 3),
        "linear_key_head_dim": own.randint(3, 20),
        "linear_value_head_dim": own.randint(3, 20),
        "linear_conv_kernel_dim": own.randint(2, 5),
        "attention_bias": own.random() < 0.5,
    }


def _drawn_nemotron(own: random.Random, _window: int, mask: list[str], _dim: int) -> dict[str, Any]:
    kinds = []
    for _ in mask:
        kinds.append(own.choice(["linear_attention", "full_attention"]))
        kinds += own.choice([[], ["mlp"], ["moe"], ["moe"]])
    return {
        "layers_block_type": kinds,
        # Squares grow: of a stream of 4 channels, with 1e-5, two orders of a float32 sum part by the tolerance.
        "layer_norm_epsilon": own.choice([1e-3, 0.01]),
        "mamba_num_heads": (heads := own.randint(1, 9)),
        "n_groups": own.choice([number for number in range(1, 10) if heads % number == 0]),
        "mamba_head_dim": own.randint(3, 20),
        "ssm_state_size": own.randint(3, 20),
        "conv_kernel": own.randint(2, 5),
        "use_conv_bias": own.random() < 0.5,
        "use_bias": own.random() < 0.5,
        "time_step_min": 1e-30,
        "n_routed_experts": (experts := own.randint(2, 9)),
        "num_experts_per_tok": own.randint(1, experts),
        "moe_intermediate_size": (width := own.randint(3, 40)),
        "moe_shared_expert_intermediate_size": width * own.randint(1, 3),
        "routed_scaling_factor": own.uniform(0.5, 2),
        "norm_topk_prob": own.random() < 0.5,
    }


def _drawn_falcon(own: random.Random, _window: int, _mask: list[str], _dim: int) -> dict[str, Any]:
    heads, width = own.randint(1, 9), own.randint(3, 20)
    return {
        **{key: own.uniform(0.3, 1.5) for key in FALCON if key.endswith("_multiplier")},
        "ssm_multipliers": [own.uniform(0.3, 1.5) for _ in range(5)],
        "mlp_multipliers": [own.uniform(0.3, 1.5) for _ in range(2)],
        "mamba_d_ssm": heads * width,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": own.choice([number for number in range(1, 10) if heads % number == 0]),
        "mamba_d_state": own.randint(3, 20),
        "mamba_d_conv": own.randint(2, 5),
        "mamba_conv_bias": own.random() < 0.5,
        "mamba_rms_norm": own.random() < 0.5,
        "mamba_norm_before_gate": False,
        "rope_parameters": _drawn_rope(own),
    }


def _drawn_laguna(own: random.Random, window: int, mask: list[str], dim: int) -> dict[str, Any]:
    width = own.randint(3, 40)
    return {
        "sliding_window": window,
        "layer_types": mask,
        "gating": own.choice([True, "per-head", "per-element"]),
        "num_attention_heads_per_layer": [6 * own.randint(1, 2) for _ in mask],  # of 1 to 3 heads of keys
        "mlp_layer_types": [own.choice(["dense", "sparse"]) for _ in mask],
        "num_experts": (experts := own.randint(1, 9)),
        "num_experts_per_tok": own.randint(1, experts),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width * own.randint(1, 3),
        "moe_routed_scaling_factor": own.uniform(0.5, 2),
        "rope_parameters": {
            "full_attention": {**_drawn_rope(own), "partial_rotary_factor": 2 * own.randint(1, dim // 2) / dim},
            "sliding_attention": _drawn_rope(own),
        },
    }


_NOT_UNIFIED = (
    *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
)
NEW_DRAWN: dict[str, Callable[[random.Random, int, list[str], int], dict[str, Any]]] = {
    "Gemma": lambda own, *_: {"attention_bias": own.random() < 0.5, "rope_parameters": _drawn_rope(own)},
    "Gemma2": lambda own, window, mask, _: {
        **_drawn_gemma(own, window, mask),
        "attn_logit_softcapping": own.choice([None, 1.0, 20.0]),
        "rope_parameters": _drawn_rope(own),
    },
    "Gemma3": lambda own, window, mask, _: {
        **_drawn_gemma(own, window, mask),
        "rope_parameters": {"full_attention": _drawn_rope(own), "sliding_attention": _drawn_rope(own)},
    },
    "Gemma3n": _drawn_gemma3n,
    "Gemma4": _drawn_gemma4,
    "NemotronH": _drawn_nemotron,
    "FalconH1": _drawn_falcon,
    "Laguna": _drawn_laguna,
    "Gemma4Unified": lambda own, *of: {
        key: value for key, value in _drawn_gemma4(own, *of).items() if key not in _NOT_UNIFIED
    },
    "Olmo2": lambda own, *_: {"attention_bias": own.random() < 0.5, "rope_parameters": _drawn_rope(own)},
    "Olmo3": lambda own, window, mask, _: {
        "sliding_window": window,
        "layer_types": mask,
        "attention_bias": own.random() < 0.5,
        "rope_parameters": {"full_attention": _drawn_rope(own), "sliding_attention": _drawn_rope(own)},
    },
    "Exaone4": lambda own, window, mask, _: {"sliding_window": window, "layer_types": mask},
    "Glm4": lambda own, _window, _mask, dim: {
        "attention_bias": own.random() < 0.5,
        "partial_rotary_factor": 2 * own.randint(1, dim // 2) / dim,
    },
    "Ministral3": lambda own, window, *_: {
        "sliding_window": own.choice([None, window]),
        "rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": own.uniform(0.05, 0.5)},
    },
    "HunYuanDenseV1": lambda own, *_: {
        "attention_bias": own.random() < 0.5,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": own.uniform(1, 9), "factor": 1.0},
    },
    "Ernie4_5": lambda own, *_: {"use_bias": own.random() < 0.5, "rope_parameters": _drawn_rope(own)},
    "Cohere": lambda own, *_: {
        "attention_bias": own.random() < 0.5,
        "layer_norm_eps": own.choice([1e-5, 0.01]),
        "logit_scale": own.uniform(0.1, 1.0),
        "rope_parameters": _drawn_rope(own),
    },
    "Cohere2": lambda own, window, mask, _: {
        "attention_bias": own.random() < 0.5,
        "layer_norm_eps": own.choice([1e-5, 0.01]),
        "logit_scale": own.uniform(0.1, 1.0),
        "sliding_window": window,
        "layer_types": mask,
        "rope_parameters": _drawn_rope(own),
    },
    "Arcee": lambda own, *_: {
        "attention_bias": own.random() < 0.5,
        "mlp_bias": own.random() < 0.5,
        "rope_parameters": _drawn_rope(own),
    },
    "Apertus": lambda own, *_: {
        "attention_bias": own.random() < 0.5,
        "rope_parameters": own.choice([_drawn_rope(own), LLAMA3_ROPE]),
    },
    "Lfm2": lambda own, _window, mask, _: {
        "layer_types": [own.choice(["conv", "full_attention"]) for _ in mask],
        "conv_L_cache": own.randint(2, 5),
        "conv_bias": own.random() < 0.5,
        "block_auto_adjust_ff_dim": own.random() < 0.5,
        "block_multiple_of": own.randint(1, 20),
        "block_ffn_dim_multiplier": own.uniform(0.5, 2),
    },
    "Lfm3": lambda own, window, mask, dim: {
        "sliding_window": window,
        "layer_types": [own.choice(["conv", kind]) for kind in mask],
        "conv_L_cache": own.randint(2, 9),
        "conv_bias": own.random() < 0.5,
        "attention_bias": own.random() < 0.5,
        "use_sandwich_norm": own.random() < 0.7,
        "use_attention_gate": own.random() < 0.7,
        "norm_eps": own.choice([1e-5, 0.01]),
        "rope_parameters": {
            kind: own.choice([_drawn_rope(own), share := _drawn_share(own, dim), {**share, "rope_type": "default"}])
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "HunYuanMoEV1": lambda own, *_: {
        "num_experts": (experts := own.randint(1, 7)),
        "moe_topk": own.randint(1, experts),
        "attention_bias": own.random() < 0.5,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": own.uniform(1, 9), "factor": 1.0},
    },
    "Lfm2Moe": lambda own, _window, mask, _: {
        "layer_types": [own.choice(["conv", "full_attention"]) for _ in mask],
        "conv_L_cache": own.randint(2, 5),
        "conv_bias": own.random() < 0.5,
        "num_experts": (experts := own.randint(1, 9)),
        "num_experts_per_tok": own.randint(1, experts),
        "moe_intermediate_size": own.randint(3, 40),
        "num_dense_layers": own.randint(0, len(mask)),
        "norm_topk_prob": own.random() < 0.5,
        "routed_scaling_factor": own.uniform(0.5, 2),
        "use_expert_bias": own.random() < 0.5,
    },
    "Glm4Moe": lambda own, _window, mask, dim: {
        # Not one alone: transformers adds up the two best of its group.
        "n_routed_experts": (experts := own.randint(2, 9)),
        "num_experts_per_tok": own.randint(1, experts),
        "moe_intermediate_size": own.randint(3, 40),
        "n_shared_experts": own.randint(1, 3),
        "first_k_dense_replace": own.randint(0, len(mask)),
        "norm_topk_prob": own.random() < 0.5,
        "routed_scaling_factor": own.uniform(0.5, 2),
        "use_qk_norm": own.random() < 0.5,
        "attention_bias": own.random() < 0.5,
        "partial_rotary_factor": 2 * own.randint(1, dim // 2) / dim,
    },
    "DeepseekV2": lambda own, _window, mask, _: {
        **_drawn_latents(own),
        "first_k_dense_replace": own.randint(0, len(mask)),
        "rope_parameters": own.choice(
            [_drawn_rope(own), {**YARN, "mscale": own.uniform(0.1, 1), "mscale_all_dim": 0.7}]
        ),
    },
    "Glm4MoeLite": lambda own, _window, mask, _: {
        **_drawn_latents(own),
        "mlp_layer_types": [own.choice(["dense", "sparse"]) for _ in mask],
        "norm_topk_prob": own.random() < 0.5,
        "rope_parameters": _drawn_rope(own),
    },
    "Ernie4_5_Moe": lambda own, _window, mask, _: {
        "moe_num_experts": (experts := own.randint(1, 9)),
        "moe_k": own.randint(1, experts),
        "moe_intermediate_size": own.randint(3, 40),
        "moe_num_shared_experts": own.randint(0, 2),
        "moe_layer_interval": own.randint(1, 2),
        "moe_layer_start_index": own.randint(0, 1),
        "moe_layer_end_index": own.choice([-1, len(mask) - 1]),
    },
    "MuseGlimmer": lambda own, window, mask, _: {
        "sliding_window": window,
        "layer_types": mask,
        "post_norm_eps": own.choice([1e-8, 0.1]),
        "qk_scale_factor": own.uniform(0.5, 4),
        "output_multiplier": own.uniform(0.1, 2),
        "final_logit_softcapping": own.uniform(2, 20),
        "rope_parameters": (rope := _drawn_rope(own)),
        "layer_rope_theta": [own.choice([0, rope["rope_theta"]]) for _ in mask],
    },
    "OlmoHybrid": lambda own, _window, mask, _: {
        **_drawn_delta(own, mask),
        # transformers wants one of each.
        "layer_types": own.sample(kinds := ["linear_attention", "full_attention"], 2) + own.choices(kinds, k=len(mask)),
        "num_hidden_layers": len(mask) + 2,
        "linear_allow_neg_eigval": own.random() < 0.7,
        "rope_parameters": own.choice([_drawn_rope(own), NO_ROPE]),
    },
    "Qwen3_5": lambda own, _window, mask, dim: {
        **_drawn_delta(own, mask),
        "rope_parameters": {**_drawn_rope(own), "partial_rotary_factor": 2 * own.randint(1, dim // 2) / dim},
    },
}
"""Options of families, by a generator, the window, the kinds of blocks, and the width of a head."""


def drawn_changes(family: str, seed: int) -> dict[str, Any]:
    """A configuration of a family, drawn at random: layers, heads, odd sizes, windows and the family's own options."""
    generator = random.Random(f"{family} {seed}")
    kv_heads, layers, dim = generator.randint(1, 3), generator.randint(1, 5), 2 * generator.randint(2, 9)
    heads, window = kv_heads * generator.randint(1, 4), generator.choice([None, 1, 3, 8])

    def flag() -> bool:
        return generator.random() < 0.5

    experts = generator.randint(1, 9)
    chosen = {"num_experts_per_tok": generator.randint(1, experts)}
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
        "Mixtral": {"num_local_experts": experts, "sliding_window": window, **chosen},
        "GptOss": {
            "num_local_experts": experts,
            "sliding_window": window or 4,
            "layer_types": mask,
            "attention_bias": flag(),
            "swiglu_limit": generator.choice([0.5, 7.0]),
            "rope_parameters": _drawn_rope(generator),
            **chosen,
        },
        "Olmoe": {"num_experts": experts, "norm_topk_prob": flag(), **chosen},
        "Qwen3Moe": {
            "num_experts": experts,
            "moe_intermediate_size": generator.randint(3, 40),
            "norm_topk_prob": flag(),
            "decoder_sparse_step": generator.randint(1, 2),
            "mlp_only_layers": [layer for layer in range(layers) if generator.random() < 0.2],
            **chosen,
        },
    }
    of_qwen = own["Qwen3Moe"]
    shared = {"shared_expert_intermediate_size": generator.randint(1, 3) * of_qwen["moe_intermediate_size"]}
    own["Qwen2Moe"] = {**own["Qwen2"], **of_qwen, **shared, "qkv_bias": flag()}
    own["GraniteMoe"] = {**own["Granite"], "num_local_experts": experts, **chosen}
    inner = heads * dim * (expand := generator.randint(1, 2))
    state_heads = generator.choice([number for number in range(1, 13) if inner % number == 0])
    own["GraniteMoeHybrid"] = {
        **own["GraniteMoe"],
        **({} if flag() else {"num_local_experts": 0}),
        "shared_intermediate_size": 24 * generator.randint(1, 3),
        "layer_types": [generator.choice(["mamba", "attention"]) for _ in mask],
        "position_embedding_type": generator.choice([None, "rope"]),
        "mamba_expand": expand,
        "mamba_n_heads": state_heads,
        "mamba_n_groups": generator.choice([number for number in range(1, 13) if state_heads % number == 0]),
        "mamba_d_state": generator.randint(3, 20),
        "mamba_d_conv": generator.randint(2, 5),
        "mamba_conv_bias": flag(),
        "mamba_proj_bias": flag(),
    }
    own["GraniteMoeShared"] = {**own["GraniteMoe"], "intermediate_size": 24, "shared_intermediate_size": 24 * experts}
    dense = "Qwen3_5" if family in ("Qwen3_5Moe", "Qwen3Next") else family
    if dense in NEW_DRAWN:
        own[family] = NEW_DRAWN[dense](generator, window or 4, mask, dim)
    if dense != family:
        taken = ("num_experts", "moe_intermediate_size") if family == "Qwen3_5Moe" else tuple(of_qwen)
        own[family] |= {key: of_qwen[key] for key in taken} | chosen | shared
    # Heads of these are as wide as the hidden size says; the others take any width.
    divided = family in (
        "Qwen2",
        "Qwen2Moe",
        "Phi3",
        "SmolLM3",
        "Granite",
        "Olmoe",
        "Lfm2",
        "Lfm2Moe",
        "Cohere",
        "Cohere2",
        "OlmoHybrid",
    )
    divided = divided or family.startswith("GraniteMoe")
    hidden = heads * dim if divided else heads * generator.randint(2, 20)
    of_heads = {} if divided else {"head_dim": dim}
    if family in ("DeepseekV2", "Glm4MoeLite"):
        of_heads, kv_heads = {}, heads
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": 24 if family == "GraniteMoeHybrid" else generator.randint(5, 90),
        "tie_word_embeddings": flag(),
        **of_heads,
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
    texts = ("MuseGlimmer", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    kind = f"{family}Text" if family in texts else family
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    # Only there are scores capped.
    eager = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    config._attn_implementation = eager.get("attn_implementation")
    config._experts_implementation = "eager"  # the default one takes no odd widths
    kind_of_model = muse_glimmer() if family == "MuseGlimmer" else getattr(transformers, f"{family}ForCausalLM")
    model = kind_of_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                offset = (
                    family in ("Gemma", "Gemma2", "Gemma3")
                    or (family == "MuseGlimmer" and "layers" in name)
                    or (family.startswith(("Qwen3_5", "Qwen3Next")) and "linear_attn" not in name)
                )
                parameter.normal_(0.0 if offset else 1.0, 0.3)
                if family.startswith(("Gemma3n", "Gemma4")) and "q_norm" in name:
                    parameter.mul_(0.3)  # scores are not divided by the root of D
            else:
                parameter.normal_(0.0, 0.5 if parameter.ndim == 1 else 1.5 / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.5)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.3, 1.5)
    return model


def muse_glimmer() -> Any:
    """The text part of Muse Glimmer as a class of its own: transformers has it within the whole alone."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.muse_glimmer import configuration_muse_glimmer, modeling_muse_glimmer

    class MuseGlimmerForCausalLM(modeling_muse_glimmer.MuseGlimmerPreTrainedModel):
        config_class = configuration_muse_glimmer.MuseGlimmerTextConfig
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = modeling_muse_glimmer.MuseGlimmerTextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Any, cache: Any = None, **others: Any) -> Any:
            states = self.model(input_ids=input_ids, cache=cache, **others).last_hidden_state
            cap, scale = self.config.final_logit_softcapping, self.config.output_multiplier
            return CausalLMOutputWithPast(logits=cap * torch.tanh(self.lm_head(states) * scale / cap))

    return MuseGlimmerForCausalLM


def random_case(case: str) -> Any:
    """The random model of one of `CASES`."""
    family, changes = CASES[case]
    return random_model(family, seed=case, **changes)


def with_mtp(folder: Path, case: str) -> tuple[Any, Any]:
    """Save a random model with a block that predicts a further token. Returns the model, and one of that block."""
    from safetensors.torch import load_file, save_file

    family, changes = CASES[case]
    model = random_case(case)
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    one |= {"mlp_layer_types": ["sparse"], "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "NemotronH":
        one = {"layers_block_type": ["full_attention", "moe"]}
    block = random_model(family, seed="mtp", **{**changes, **one})
    model.save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    C, layers = model.config.hidden_size, model.config.num_hidden_layers
    block.save_pretrained(folder / "block")
    own = load_file(folder / "block/model.safetensors")
    qwen = family.startswith("Qwen")
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.")
    if family == "NemotronH":
        names = (*(f"mtp.layers.0.{part}" for part in ("eh_proj", "enorm", "hnorm")), "mtp.layers.1.final_layernorm")
    elif not qwen:
        last = f"model.layers.{layers}."
        names = (*(last + part for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm")), last)
    for name, shape in zip(names, ((C, 2 * C), C, C), strict=False):
        held[f"{name}.weight"] = torch.randn(shape) / 4
    start = "model.layers.0."
    if family == "NemotronH":
        held[f"{names[3]}.weight"] = own["backbone.norm_f.weight"]
        held |= {name.replace("backbone.", "mtp."): own[name].clone() for name in own if ".layers." in name}
    else:
        held[f"{names[3]}.weight"] = own["model.norm.weight"]
        held |= {names[4] + name.removeprefix(start): own[name].clone() for name in own if name.startswith(start)}
    save_file(held, folder / "model.safetensors")
    return model, block
