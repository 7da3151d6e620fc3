"""GGUF files of tiny models, written with the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch

from models.gguf.header import Header
from models.recipe import SUPER_GROUP
from tests.models import random_models

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ARCHITECTURES = {
    **{
        name: name
        for name in (
            "llama",
            "qwen2",
            "qwen3",
            "phi3",
            "gemma2",
            "olmo2",
            "exaone4",
            "glm4",
            "ernie4_5",
            "lfm2",
            "arcee",
        )
    },
    "gemma": "gemma",
    "apertus": "apertus",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "olmoe": "olmoe",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "deepseek_v2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
}
"""`general.architecture` by `model_type`."""
_FLAT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""That of a model which has none."""
PAIRED = ("granitehybrid", "llama", "arcee", "mistral3", "smollm3", "granite", "granitemoe")
"""Those whose rows of q and k are in llama.cpp's order."""
KNOWN = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_AFTER_LAYER = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
"""Names of GLM-4's norms; the package takes one of the others for two."""
SIZES: dict[str, Any] = {
    **random_models.SIZES,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}


def architecture_of(config: Any) -> str:
    if config.model_type == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config.layers_block_type else "nemotron_h"
    return ARCHITECTURES[config.model_type]


def random_model(family: str, **changes: Any) -> Any:
    """A random model whose sizes GGUF's blocks divide."""
    return random_models.random_model(family, **{**SIZES, **changes})


def write_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Byte-level BPE over single letters: `size` tokens, the first three special ones."""
    tokens = ["<unk>", "<s>", "</s>", "Ġ", "th", *LETTERS]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), size)]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (2 + len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([*kinds, *([gguf.TokenType.UNUSED] * (size - len(kinds)))])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


_NEVER_LOW_BIT = ("conv.conv", "conv1d", "altup", "laurel", "per_layer_model_projection")
"""Parts of names of matrices that llama.cpp leaves as they are."""


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a model of transformers.

    Args:
        path: The file.
        model: The model.
        kind: Type of its matrices; norms and biases are F32 always.
        kinds: Types of some by their names in the file.
        metadata: Further values by their whole keys.
        left_out: Tensors that are not written, by their names in the file.
        extra: Further tensors, by their names in the file.
    """
    config = model.config
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, architecture_of(config))
    writer.add_type("model")
    describe(writer, model)
    write_tokenizer(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        add(writer, key, value)
    names = names_of(writer.arch, config.num_hidden_layers)
    for name, tensor in tensors_of(model).items():
        own = names(name)
        assert own is not None
        if own not in left_out:
            whole = tensor.ndim == 1 or tensor.shape[-1] == 1 or name.endswith(("bias", "norm.weight"))
            whole |= any(part in name for part in _NEVER_LOW_BIT)
            dtype = gguf.GGMLQuantizationType["F32" if whole else (kinds or {}).get(own, kind)]
            writer.add_tensor(own, quantized(tensor, dtype), raw_dtype=dtype)
    factors = {f"{name}.weight": factors for name, factors in rotary_factors(config).items()}
    for name, tensor in {**factors, **(extra or {})}.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def quantized(tensor: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Blocks of a type. Those of Q4_K to Q6_K, which the package cannot make, are drawn by each row's numbers."""
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quantize(tensor, kind)
    rows = tensor.reshape(-1, tensor.shape[-1])
    blocks = np.stack([drawn_blocks(row.size // SUPER_GROUP, kind.name, crc32(row.tobytes())) for row in rows])
    return blocks.reshape(*tensor.shape[:-1], -1)


def drawn_blocks(count: int, kind: str, seed: int, scales: Any = (1e-5, -2e-5, 3e-5)) -> Any:
    """Blocks with any bits but for the scales (and minimums) in half precision, uint8 [bytes]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), np.uint8)
    halves = rng.choice(np.array(scales, "<f2"), (count, 2)).view(np.uint8)
    if kind != "Q6_K":
        halves[:, 2:] = (10 * halves.view("<f2")[:, 1:]).view(np.uint8)
        blocks[:, :4] = halves
    else:
        blocks[:, 208:] = halves[:, :2]
    return blocks.reshape(-1)


def names_of(architecture: str, blocks: int) -> Callable[[str], str | None]:
    """Names in a file by those in Hugging Face's format."""
    names = gguf.get_tensor_name_map(KNOWN[architecture], blocks)

    def name_of(name: str) -> str | None:
        module, _, part = name.rpartition(".")
        layer, _, last = module.removeprefix("model.layers.").partition(".")
        if last == "router" and part != "weight":
            return f"blk.{layer}." + ("ffn_gate_inp.scale" if part == "scale" else "ffn_down_exps.scale")
        if architecture.startswith("nemotron") and ".experts." not in name and last != "gate":
            name = name.replace("model.", "backbone.", 1)
        if part == "correct_output_scale":
            return f"blk.{layer}.altup_correct_scale.weight"
        if part == "layer_scalar":
            return f"blk.{layer}.layer_output_scale.weight"
        if part == "dt_bias":
            return f"blk.{layer}.ssm_dt.bias"
        if part == "expert_bias":
            return f"blk.{layer}.exp_probs_b.bias"
        if part in ("sinks", "e_score_correction_bias"):
            return f"blk.{layer}." + ("attn_sinks.weight" if part == "sinks" else "exp_probs_b.bias")
        if architecture == "glm4" and last.endswith("_layernorm"):
            after = {**_AFTER_LAYER, "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
            return f"blk.{layer}.{after[last]}.{part}"
        found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found

    return name_of


def describe(writer: gguf.GGUFWriter, model: Any) -> None:
    """Write what llama.cpp's converter writes of a configuration."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or _FLAT_ROPE
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type == "nemotron_h":
        _describe_nemotron(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type in ("granitemoehybrid", "falcon_h1"):
        inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
        _describe_mamba(
            writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads, inner
        )
    if config.model_type == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(1 + config.layer_types.index("full_attention"))
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts and config.model_type != "nemotron_h":
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "top_k_experts", None) or config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type == "gpt_oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if config.model_type == "glm4_moe":
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
        if config.model_type == "lfm2_moe":
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if config.model_type == "hunyuan_v1_moe":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if config.model_type == "ernie4_5_moe":
            writer.add_expert_shared_count(config.moe_num_shared_experts)
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
            writer.add_interleave_moe_layer_step(config.moe_layer_interval)
            shared = config.moe_intermediate_size * config.moe_num_shared_experts
            writer.add_expert_shared_feed_forward_length(shared)
        if config.model_type in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "apertus":
        for key in ("alpha_p", "alpha_n"):
            numbers = [getattr(layer.mlp.act_fn, key).item() for layer in model.model.layers]
            getattr(writer, f"add_xielu_{key}")(numbers)
    writer.add_head_count(config.num_attention_heads)
    kv_heads, types = config.num_key_value_heads, getattr(config, "layer_types", None) or []
    if "conv" in types or config.model_type in ("granitemoehybrid", "nemotron_h"):
        kv_heads = [kv_heads * (kind in ("attention", "full_attention")) for kind in types]
    writer.add_head_count_kv(kv_heads)
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        key = {"lfm2": "norm_eps", "nemo": "layer_norm_epsilon"}.get(config.model_type[:4], "rms_norm_eps")
        writer.add_layer_norm_rms_eps(getattr(config, key))
    writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None and config.model_type == "gemma3_text":
        writer.add_float32("gemma3.rope.freq_base_swa", local["rope_theta"])
    if config.model_type == "gemma3n_text":
        _describe_gemma3n(writer, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "gemma4_text":
        _describe_gemma4(writer, config)
    if architecture_of(config) == "deepseek2":
        _describe_latents(writer, config)
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("phi3", "mistral", "gpt_oss", "cohere2"):
        writer.add_sliding_window(window or 0)
    elif window and config.model_type in ("gemma2", "gemma3_text", "gemma3n_text", "olmo3", "exaone4"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for cap, add_cap in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if getattr(config, cap, None):
            add_cap(getattr(config, cap))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        share = 0.1 if architecture_of(config) == "deepseek2" else 1.0
        writer.add_rope_scaling_yarn_log_mul(share * (rope.get("mscale_all_dim") or 0.0))
    if config.model_type == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _describe_mamba(writer: gguf.GGUFWriter, taps: int, width: int, groups: int, heads: int, inner: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(width)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)


def _describe_nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    heads, types = config.mamba_num_heads, config.layers_block_type
    inner = heads * config.mamba_head_dim
    _describe_mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, heads, inner)
    routed = "moe" in types
    width = config.moe_intermediate_size if routed else config.intermediate_size
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in types])
    writer.add_rope_scaling_finetuned(False)
    if not routed:
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_group_count(1)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_gemma3n(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_float32("gemma3n.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())


def _describe_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Sizes that differ between blocks. Keys that are written for the second time hold what counts."""
    layers, local = range(config.num_hidden_layers), [kind == "sliding_attention" for kind in config.layer_types]
    wide = config.per_layer_config[local.index(False)]
    own = {
        "attention.key_length": wide.head_dim,
        "attention.value_length": wide.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "rope.dimension_count": wide.head_dim,
        "rope.dimension_count_swa": config.head_dim,
    }
    for key in (*own, "feed_forward_length", "attention.head_count_kv"):
        writer.kv_data[0].pop(f"gemma4.{key}", None)
    for key, value in own.items():
        writer.add_uint32(f"gemma4.{key}", value)
    shared = [layer >= config.num_hidden_layers - config.num_kv_shared_layers for layer in layers]
    double = [1 + (config.use_double_wide_mlp and each) for each in shared]
    writer.add_feed_forward_length([config.intermediate_size * factor for factor in double])
    writer.add_head_count_kv([config.per_layer_config[layer].num_key_value_heads for layer in layers])
    writer.add_float32("gemma4.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(local)


def _describe_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    sigmoid, rotating = config.model_type == "glm4_moe_lite", config.qk_rope_head_dim
    dense = config.mlp_layer_types.count("dense") if sigmoid else config.first_k_dense_replace
    own = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotating,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotating,
        "attention.value_length_mla": config.v_head_dim,
        "expert_group_count": 1,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": dense,
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": sigmoid and config.norm_topk_prob,
    }
    for key, value in own.items() | (
        {"attention.q_lora_rank": config.q_lora_rank}.items() if config.q_lora_rank else set()
    ):
        add(writer, f"deepseek2.{key}", value)


def rotary_factors(config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Tables of factors by the names that files give them."""
    rope = getattr(config, "rope_parameters", None) or _FLAT_ROPE
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{side}": np.array(rope[f"{side}_factor"], np.float32) for side in ("short", "long")}
    if rope["rope_type"] == "proportional":
        pairs = config.per_layer_config["full_attention"].head_dim // 2
        turning = int(rope["partial_rotary_factor"] * pairs)
        return {"rope_freqs": np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)}
    if rope["rope_type"] != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = 2 * len(scaled)
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    return {"rope_freqs": (plain / scaled.numpy()).astype(np.float32)}


def tensors_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Weights by their names in Hugging Face's format; Llama's q and k in llama.cpp's order of rows, Gemma's 1 + w."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "act_fn" in name:  # among the metadata
            continue
        array = tensor.float().numpy()
        if ".altup_" in name:
            stem = name.rsplit(".", 2)[0]
            found[f"{stem}.weight"] = np.concatenate(
                [*([found[f"{stem}.weight"]] if name[-8] != "0" else ()), array[None]]
            )
            continue
        if name.endswith(("conv.conv.weight", "mamba.conv1d.weight", "mixer.conv1d.weight")):
            array = array.squeeze(1)
        if name.endswith(("mamba.D", "mixer.D", "mamba.A_log", "mixer.A_log")):
            array = (-tensor.float().exp().numpy() if name.endswith("A_log") else array)[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups
            array = array.reshape(groups, -1)
        if "linear_attn" in name and config.model_type == "qwen3_next":
            found |= _next_tensors(config, name, array)
            continue
        if "linear_attn" in name:
            array = _delta_tensor(config, name, array)
        elif config.model_type.startswith(("qwen3_5", "qwen3_next")) and name.endswith("norm.weight"):
            array = array + 1
        if name.endswith("shared_expert_gate.weight"):
            array = array.squeeze(0)
        if config.model_type in ("gemma", "gemma2", "gemma3_text") and "norm" in name:
            array = array + 1
        if architecture_of(config) in PAIRED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        name = name.replace("block_sparse_moe.router.", "mlp.gate.").replace("block_sparse_moe.", "mlp.")
        name = name.replace("shared_mlp.input_linear.", "mlp.shared_expert.gate_up_proj.")
        name = name.replace("shared_mlp.output_linear.", "mlp.shared_expert.down_proj.")
        if config.model_type == "granitemoehybrid" and not config.num_local_experts:
            name = name.replace("mlp.shared_expert.", "mlp.")
        if ".mixer.experts." in name:
            name = name.replace(".mixer.", ".mlp.")
        prefix, _, last = name.rpartition(".")
        if prefix.endswith(("shared_expert.gate_up_proj", "mlp.gate_up_proj")) and "granite" in config.model_type:
            gate, up = np.split(array, 2)
            own = prefix.removesuffix("gate_up_proj")
            found |= {f"{own}gate_proj.weight": gate, f"{own}up_proj.weight": np.ascontiguousarray(up)}
            continue
        if config.model_type == "gpt_oss" and prefix.endswith("experts"):
            # [E, inputs, outputs], gate and up in turns.
            bias, kind = last.endswith("_bias"), "bias" if last.endswith("_bias") else "weight"
            turned = array if bias else array.swapaxes(1, 2)
            parts = ("gate_proj", "up_proj") if last.startswith("gate_up") else ("down_proj",)
            for at, part in enumerate(parts):
                found[f"{prefix}.{part}.{kind}"] = np.ascontiguousarray(turned[:, at :: len(parts)])
        elif name.endswith("kv_b_proj.weight"):
            keys, values = np.split(
                array.reshape(config.num_attention_heads, -1, array.shape[1]), [config.qk_nope_head_dim], 1
            )
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
        elif name.endswith("e_score_correction_bias"):
            found[name] = array.reshape(-1)
        elif name.endswith("experts.gate_up_proj") and config.model_type != "gemma4_text":
            prefix = name.removesuffix("gate_up_proj")
            for at, part in enumerate(("gate_proj", "up_proj")):
                found[f"{prefix}{part}.weight"] = np.ascontiguousarray(np.split(array, 2, axis=1)[at])
        else:
            found[f"{name}.weight" if "experts" in name and name.endswith("_proj") else name] = array
    return found


def write_part(path: Path, header: Header, number: int, count: int) -> None:
    """Write every so many tensors of a float32 file, and in the first part its metadata, as `llama-gguf-split` does."""
    writer = gguf.GGUFWriter(path, str(header.metadata.get("general.architecture", "llama")))
    for key, value in header.metadata.items() if number == 0 else ():
        if key != "general.architecture":
            add(writer, key, list(value) if isinstance(value, memoryview) else value)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", len(header.tensors))
    for name in sorted(header.tensors)[number::count]:
        info = header.tensors[name]
        writer.add_tensor(
            name, np.fromfile(info.path, np.float32, info.size // 4, offset=info.offset).reshape(info.shape)
        )
    finish(writer)


def _delta_tensor(config: Any, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A tensor of a delta rule as files have it: value heads in turns of key heads, -exp(A) in place of A."""
    keys, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    numbers = np.arange(heads).reshape(keys, -1).T.flatten()
    channels = (numbers[:, None] * width + np.arange(width)).flatten()
    kind, first = name.split("linear_attn.")[1], 2 * keys * config.linear_key_head_dim
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        array = np.concatenate((array[:first], array[first:][channels]))
        return array.squeeze(1) if kind.startswith("conv") else array
    if kind == "in_proj_z.weight":
        return array[channels]
    if kind == "out_proj.weight":
        return np.ascontiguousarray(array[:, channels])
    if kind in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        array = array[numbers]
    return -torch.from_numpy(array).exp().numpy() if kind == "A_log" else array


def _next_tensors(config: Any, name: str, array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Those of a delta rule of Qwen3-Next: q, k and v of all heads are apart from their gates."""
    if name.endswith("A_log"):
        array = -torch.from_numpy(array).exp().numpy()
    if not name.endswith("in_proj_qkvz.weight"):
        return {name: array.squeeze(1) if "conv1d" in name else array}
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
    width = config.linear_key_head_dim
    parts = np.split(array.reshape(heads, -1, array.shape[1]), [width, 2 * width, 2 * width + values // heads], axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
    stem = name.removesuffix("qkvz.weight")
    return {f"{stem}qkv.weight": np.concatenate((q, k, v)), f"{stem}z.weight": np.ascontiguousarray(z)}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a value, in place of an earlier one of that key."""
    for data in writer.kv_data:
        data.pop(key, None)
    if value is None:
        return
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
