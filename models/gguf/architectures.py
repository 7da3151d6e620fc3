"""Architectures of GGUF files: what each is called in config.json, and its options in Hugging Face's format.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of the `gguf` package, and what
llama.cpp makes of a file that lacks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from models.errors import UnsupportedModelError
from models.families.family import CORRECTION
from models.families.fields import Fields

Options = Callable[[Fields, str, Mapping[str, Any], frozenset[str]], dict[str, Any]]
"""Gives further entries of config.json, by the metadata, the architecture's name, the entries so far, and the names of
tensors in Hugging Face's format."""
Q_BIAS, GATE_BIAS = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.bias"
UP_BIAS = "model.layers.0.mlp.up_proj.bias"
MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""Keys of multipliers."""
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of soft caps, of scores and of logits."""
_LARGEST = {"gemma2": 46, "gemma3": 62, "exaone4": 64}
"""Blocks of the largest models. Gemma's divide scores by another number than the others, EXAONE's alone has windows."""
_EXAONE_WINDOW = 4096
"""That of the largest EXAONE 4, where a file doesn't say."""
_LOCAL_THETA = 1e4
_OWN_CACHES = 20
"""Blocks of Gemma 3n with a cache of their own, where a file doesn't say."""
_SIGMOID = 2
"""Number of the function that makes scores of a router's logits."""
_COMMON_MAMBA = {
    "heads": "mamba_n_heads",
    "dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "width": "mamba_d_state",
    "taps": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
_NEMOTRONS_MAMBA = {
    "heads": "mamba_num_heads",
    "dim": "mamba_head_dim",
    "groups": "n_groups",
    "width": "ssm_state_size",
    "taps": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
"""What config.json calls sizes of Mamba-2 (`_mamba`)."""
_INTERVALS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "exaone4": 4, "olmo2": 4, "cohere2": 4}
"""Every so many blocks one has no window, where a file doesn't say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A value of `general.architecture`."""

    model_type: str
    """`model_type` of config.json."""
    caps: tuple[str, ...] = ()
    windows: bool = False
    experts: bool = False
    shared: bool = False
    """Whether some of them may be shared."""
    multipliers: tuple[str, ...] = ()
    delta: bool = False
    post_norm: str = "ffn_norm"
    """Name of the norm before the MLP."""
    widths: bool = False
    """Whether MLPs of blocks may differ, where heads do not."""
    wide: bool = False
    """Whether blocks without a window have heads of their own, and others, too, may differ."""
    pairs: bool = False
    """Whether the rows of q and k stand in llama.cpp's order, which rotates neighbours."""
    latent: bool = False
    """Whether it has latent attention, whose keys and values are as wide as their options say."""
    options: Options = lambda *_: {}


def shortest(value: float) -> float:
    """The shortest decimal number that is the same in 32 bits: 1e-05, not 9.999999747378752e-06."""
    with np.errstate(over="ignore"):  # readers refuse infinity
        return float(str(np.float32(value)))


def _llama(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """A Llama that has experts is a Mixtral."""
    if not fields.table.get(f"{name}.expert_count"):
        return {"attention_bias": Q_BIAS in tensors, "mlp_bias": GATE_BIAS in tensors}
    found = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **_experts(fields, name)}
    return {"sliding_window": None} | found if "sliding_window" not in config else found


def _qwen2moe(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {
        **_experts(fields, name),
        "qkv_bias": Q_BIAS in tensors,
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer(
            f"{name}.expert_shared_feed_forward_length", config["intermediate_size"]
        ),
    }


def _qwen3moe(fields: Fields, name: str, _config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    return {
        **_experts(fields, name),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", True),
    }


def _olmoe(fields: Fields, name: str, _config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    return {**_experts(fields, name), "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", False)}


def _gpt_oss(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Files leave out what all these models have in common; llama.cpp cuts YaRN's borders to whole channels."""
    found = {**_experts(fields, name), "attention_bias": Q_BIAS in tensors}
    found["intermediate_size"] = fields.integer(f"{name}.expert_feed_forward_length", config["intermediate_size"])
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    return found | {"rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling}


def _check_sigmoid(fields: Fields, name: str) -> None:
    function = fields.integer(f"{name}.expert_gating_func", _SIGMOID)
    if function != _SIGMOID:
        raise UnsupportedModelError(
            f"{fields.source}: '{name}.expert_gating_func' is {function}; {_SIGMOID} alone, a sigmoid, is supported. "
            "Choose another model."
        )


def _glm4moe(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    _check_sigmoid(fields, name)
    return {
        "n_routed_experts": fields.integer(f"{name}.expert_count"),
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "n_shared_experts": _number(fields, f"{name}.expert_shared_count"),
        "first_k_dense_replace": _number(fields, f"{name}.leading_dense_block_count"),
        "routed_scaling_factor": fields.number(f"{name}.expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", False),
        "use_qk_norm": any(tensor.endswith("q_norm.weight") for tensor in tensors),
        "attention_bias": Q_BIAS in tensors,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


def _deepseek2(fields: Fields, name: str, config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    """GLM-4.7-Flash where scores are sigmoids. Files from before llama.cpp kept latents say less."""
    rotating, scaling = fields.integer(f"{name}.rope.dimension_count"), dict(config.get("rope_scaling", {}))
    keys, values = (
        fields.integer(f"{name}.attention.{kind}_length_mla", fields.table.get(f"{name}.attention.{kind}_length"))
        for kind in ("key", "value")
    )
    if scaling.get("mscale_all_dim"):  # files have a tenth
        strength = shortest(10 * scaling["mscale_all_dim"])
        scaling |= {"mscale": strength, "mscale_all_dim": strength}
    v2 = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    return {
        **({} if fields.table.get(f"{name}.expert_gating_func") == _SIGMOID else v2),
        **({"rope_scaling": scaling} if scaling else {}),
        "kv_lora_rank": fields.integer(f"{name}.attention.kv_lora_rank"),
        "q_lora_rank": fields.optional_integer(f"{name}.attention.q_lora_rank"),
        "qk_rope_head_dim": rotating,
        "qk_nope_head_dim": keys - rotating,
        "v_head_dim": values,
        "n_routed_experts": fields.integer(f"{name}.expert_count"),
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "n_shared_experts": _number(fields, f"{name}.expert_shared_count"),
        "first_k_dense_replace": _number(fields, f"{name}.leading_dense_block_count"),
        "routed_scaling_factor": shortest(fields.number(f"{name}.expert_weights_scale", 1.0)),
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", False),
    }


def _ernie_moe(fields: Fields, name: str, _config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    return {
        "moe_num_experts": fields.integer(f"{name}.expert_count"),
        "moe_k": fields.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "moe_num_shared_experts": _number(fields, f"{name}.expert_shared_count"),
        "moe_layer_start_index": _number(fields, f"{name}.leading_dense_block_count"),
        "moe_layer_interval": fields.integer(f"{name}.interleave_moe_layer_step", 1),
    }


def delta_sizes(fields: Fields, name: str) -> tuple[int, int, int, int]:
    """Key heads of a delta rule and their width, value heads and theirs."""
    heads, whole = fields.integer(f"{name}.ssm.time_step_rank"), fields.integer(f"{name}.ssm.inner_size")
    if whole % heads:
        raise fields.wrong(f"{name}.ssm.inner_size", whole, f"a multiple of {name}.ssm.time_step_rank ({heads})")
    key_heads = fields.integer(f"{name}.ssm.group_count")
    if heads % key_heads:
        raise fields.wrong(f"{name}.ssm.time_step_rank", heads, f"a multiple of {name}.ssm.group_count ({key_heads})")
    return key_heads, fields.integer(f"{name}.ssm.state_size"), heads, whole // heads


def _qwen35(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Blocks with a delta rule have its decays."""
    blocks = range(config["num_hidden_layers"])
    delta = [f"model.layers.{block}.linear_attn.A_log" in tensors for block in blocks]
    key_heads, key_dim, value_heads, value_dim = delta_sizes(fields, name)
    found = {
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": key_dim,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": fields.integer(f"{name}.ssm.conv_kernel"),
        "layer_types": ["linear_attention" if own else "full_attention" for own in delta],
        "attention_bias": any(tensor.endswith("q_proj.bias") for tensor in tensors),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }
    if not ARCHITECTURES[name].experts:
        return found
    width = fields.integer(f"{name}.expert_feed_forward_length")
    shared = fields.integer(f"{name}.expert_shared_feed_forward_length", width)
    widths = {"moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    return {**found, **_experts(fields, name), **widths}


def _number(fields: Fields, key: str) -> int:
    """A number that may be missing, or 0."""
    return fields.integer(key) if fields.table.get(key) else 0


def _experts(fields: Fields, name: str) -> dict[str, Any]:
    return {
        "num_local_experts": fields.integer(f"{name}.expert_count"),
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count"),
    }


def _arcee(_fields: Fields, _name: str, _config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "relu2", "attention_bias": Q_BIAS in tensors, "mlp_bias": UP_BIAS in tensors}


def _apertus(_fields: Fields, _name: str, _config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "xielu", "attention_bias": Q_BIAS in tensors}


def _cohere(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    found = {
        "layer_norm_eps": config["rms_norm_eps"],
        "attention_bias": Q_BIAS in tensors,
        "use_qk_norm": any(tensor.endswith("q_norm.weight") for tensor in tensors),
        "logit_scale": shortest(fields.number(f"{name}.logit_scale", 1.0)),
    }
    return found | (_layers(fields, name, config["num_hidden_layers"]) if name == "cohere2" else {})


def _glm(_fields: Fields, _name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    rotating = config.get("partial_rotary_factor", 1.0)
    return {"attention_bias": Q_BIAS in tensors, "partial_rotary_factor": rotating}


def _attention_bias(_fields: Fields, _name: str, _config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"attention_bias": Q_BIAS in tensors}


def _ernie(_fields: Fields, _name: str, _config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    return {"use_bias": Q_BIAS in tensors}


def _any_ends(tensors: frozenset[str], end: str) -> bool:
    return any(tensor.endswith(end) for tensor in tensors)


def _multipliers(fields: Fields, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Granite's."""
    width = config.get("head_dim") or config["hidden_size"] / config["num_attention_heads"]
    return {
        "attention_multiplier": shortest(fields.number(f"{name}.attention.scale", 1 / math.sqrt(width))),
        "embedding_multiplier": shortest(fields.number(f"{name}.embedding_scale", 1.0)),
        "residual_multiplier": shortest(fields.number(f"{name}.residual_scale", 1.0)),
        "logits_scaling": shortest(fields.number(f"{name}.logit_scale", 1.0)),
    }


def _granite(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """One that has experts has other tensors; with a shared one, it is another model."""
    found = _multipliers(fields, name, config)
    found |= {"attention_bias": Q_BIAS in tensors, "mlp_bias": GATE_BIAS in tensors}
    if not ARCHITECTURES[name].experts:
        return found
    shared = fields.optional_integer(f"{name}.expert_shared_feed_forward_length")
    other = {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
    return {
        **found,
        **_experts(fields, name),
        **({} if shared is None else {**other, "shared_intermediate_size": shared}),
    }


def _mamba(fields: Fields, name: str, tensors: frozenset[str], keys: Mapping[str, str]) -> dict[str, Any]:
    """Sizes of Mamba-2 by what config.json calls them."""
    groups, width, heads, dim = delta_sizes(fields, name)
    found = {
        "heads": heads,
        "dim": dim,
        "groups": groups,
        "width": width,
        "taps": fields.integer(f"{name}.ssm.conv_kernel"),
        "conv_bias": _any_ends(tensors, "mamba.conv1d.bias"),
        "bias": _any_ends(tensors, "mamba.in_proj.bias"),
    }
    return {key: found[own] for own, key in keys.items()}


def _granite_hybrid(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Blocks with Mamba-2 have its decays."""
    mamba = [f"model.layers.{block}.mamba.A_log" in tensors for block in range(config["num_hidden_layers"])]
    found = _mamba(fields, name, tensors, _COMMON_MAMBA) if any(mamba) else {"mamba_n_heads": 1}
    inner = found["mamba_n_heads"] * found.pop("mamba_d_head", config["hidden_size"])
    if inner % config["hidden_size"]:
        raise fields.wrong(f"{name}.ssm.inner_size", inner, f"a multiple of the hidden size ({config['hidden_size']})")
    rotates = fields.flag(f"{name}.rope.scaling.finetuned", False)
    experts = fields.table.get(f"{name}.expert_count")
    return {
        **_multipliers(fields, name, config),
        **found,
        **(_experts(fields, name) if experts else {"num_local_experts": 0}),
        "mamba_expand": inner // config["hidden_size"],
        "layer_types": ["mamba" if own else "attention" for own in mamba],
        "shared_intermediate_size": fields.integer(
            f"{name}.expert_shared_feed_forward_length", config["intermediate_size"]
        ),
        "position_embedding_type": "rope" if rotates else None,
        "attention_bias": _any_ends(tensors, "q_proj.bias"),
    }


def _falcon(fields: Fields, name: str, _config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Weights in files are multiplied."""
    return {
        **_mamba(fields, name, tensors, _COMMON_MAMBA),
        "mamba_d_ssm": fields.integer(f"{name}.ssm.inner_size"),
        "mamba_rms_norm": _any_ends(tensors, "mamba.norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": _any_ends(tensors, "q_proj.bias"),
    }


def _nemotron(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """What a block is, one of its tensors says."""
    kinds = {
        "mamba.A_log": "linear_attention",
        "self_attn.q_proj.weight": "full_attention",
        "mlp.experts.up_proj.weight": "moe",
    }
    blocks = [f"model.layers.{block}." for block in range(config["num_hidden_layers"])]
    found: dict[str, Any] = {
        "layers_block_type": [
            next((kind for own, kind in kinds.items() if block + own in tensors), "mlp") for block in blocks
        ],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
        "mlp_bias": _any_ends(tensors, "mlp.up_proj.bias"),
    }
    if _any_ends(tensors, "mamba.A_log"):
        found |= _mamba(fields, name, tensors, _NEMOTRONS_MAMBA)
    if not ARCHITECTURES[name].experts:
        return found
    _check_sigmoid(fields, name)
    return {
        **found,
        "n_routed_experts": fields.integer(f"{name}.expert_count"),
        "num_experts_per_tok": fields.integer(f"{name}.expert_used_count"),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.integer(f"{name}.expert_shared_feed_forward_length"),
        "routed_scaling_factor": shortest(fields.number(f"{name}.expert_weights_scale", 1.0)),
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", True),
    }


def _lfm2(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Blocks with a convolution have its tensor, and files state the width of the MLP as it is."""
    convolves = [f"model.layers.{block}.conv.conv.weight" in tensors for block in range(config["num_hidden_layers"])]
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.integer(f"{name}.shortconv.l_cache"),
        "conv_bias": any(each.endswith("conv.conv.bias") for each in tensors),
        "layer_types": ["conv" if convolved else "full_attention" for convolved in convolves],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    _check_sigmoid(fields, name)
    return {
        **_lfm2(fields, name, config, tensors),
        **_experts(fields, name),
        "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        "num_dense_layers": _number(fields, f"{name}.leading_dense_block_count"),
        "use_expert_bias": any(tensor.endswith(CORRECTION) for tensor in tensors),
        "routed_scaling_factor": fields.number(f"{name}.expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag(f"{name}.expert_weights_norm", True),
    }


def _hunyuan_moe(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    found, experts = _attention_bias(fields, name, config, tensors), _experts(fields, name)
    width = fields.integer(f"{name}.expert_feed_forward_length", config["intermediate_size"])
    shared = fields.optional_integer(f"{name}.expert_shared_feed_forward_length") or width
    if shared != width:
        raise fields.wrong(f"{name}.expert_shared_feed_forward_length", shared, f"the width of an expert ({width})")
    topk = experts.pop("num_experts_per_tok")
    return {**found, "num_experts": experts["num_local_experts"], "moe_topk": topk, "moe_intermediate_size": width}


def _first_gemma(_fields: Fields, _name: str, _config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma(fields: Fields, name: str, config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    width, heads, blocks = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    largest = blocks == _LARGEST[name]
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if largest else config["head_dim"],
        "attn_logit_softcapping": fields.optional_number(f"{name}.attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number(f"{name}.final_logit_softcapping"),
        **_layers(fields, name, blocks),
    }
    if name == "gemma3":
        found["rope_local_base_freq"] = fields.number(f"{name}.rope.freq_base_swa", _LOCAL_THETA)
    return found


def _gemma3n(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Where gates are cut is a number of standard deviations; what files leave out is that of the published models."""
    blocks = config["num_hidden_layers"]
    found = {
        **_layers(fields, name, blocks),
        "intermediate_size": each_block(fields, f"{name}.feed_forward_length", blocks),
        "rope_local_base_freq": shortest(fields.number(f"{name}.rope.freq_base_swa", _LOCAL_THETA)),
        "altup_num_inputs": fields.integer(f"{name}.altup.num_inputs", 4),
        "altup_active_idx": fields.table.get(f"{name}.altup.active_idx") or 0,
        "num_kv_shared_layers": fields.table.get(f"{name}.attention.shared_kv_layers", max(0, blocks - _OWN_CACHES)),
        "hidden_size_per_layer_input": fields.integer(f"{name}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": config["vocab_size"],
        "attention_bias": Q_BIAS in tensors,
        "final_logit_softcapping": shortest(fields.number(f"{name}.final_logit_softcapping", 30.0)),
    }
    key = f"{name}.activation_sparsity_scale"
    scales = fields.table.get(key)
    if scales is not None:
        if not isinstance(scales, list | memoryview) or len(scales) != blocks:
            raise fields.wrong(key, scales, f"a list of {blocks} numbers")
        found["activation_sparsity_pattern"] = [round(NormalDist().cdf(scale), 6) for scale in scales]
    return found


def _gemma4(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """Sizes by block are read off lists; values are made by keys where the first block without a window has none."""
    blocks, head_dim = config["num_hidden_layers"], config["head_dim"]
    layers = _layers(fields, name, blocks)
    types = [*layers["layer_types"][:-1], "full_attention"]
    widths = each_block(fields, f"{name}.feed_forward_length", blocks)
    kv_heads = each_block(fields, f"{name}.attention.head_count_kv", blocks)
    first = {kind: types.index(kind) for kind in dict.fromkeys(types)}
    wide = first["full_attention"]
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "rope_theta": config["rope_theta"],
    }
    narrow = fields.integer(f"{name}.attention.key_length_swa", head_dim)
    local = {
        "rope_type": "default",
        "partial_rotary_factor": fields.integer(f"{name}.rope.dimension_count_swa", narrow) / narrow,
        "rope_theta": shortest(fields.number(f"{name}.rope.freq_base_swa", _LOCAL_THETA)),
    }
    experts: dict[str, Any] = {}
    if fields.table.get(f"{name}.expert_count"):
        experts = {
            "enable_moe_block": True,
            "num_experts": fields.integer(f"{name}.expert_count"),
            "top_k_experts": fields.integer(f"{name}.expert_used_count"),
            "moe_intermediate_size": fields.integer(f"{name}.expert_feed_forward_length"),
        }
    return {
        **layers,
        **experts,
        "layer_types": types,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": narrow,
        "global_head_dim": head_dim,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": kv_heads[first.get("sliding_attention", wide)],
        "num_global_key_value_heads": kv_heads[wide],
        "attention_k_eq_v": f"model.layers.{wide}.self_attn.v_proj.weight" not in tensors,
        "num_kv_shared_layers": fields.table.get(f"{name}.attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": fields.table.get(f"{name}.embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size"],
        "attention_bias": Q_BIAS in tensors,
        "final_logit_softcapping": fields.optional_number(f"{name}.final_logit_softcapping"),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def each_block(fields: Fields, key: str, blocks: int) -> list[int]:
    """A size of each block: a list, or one number for all."""
    listed = fields.table.get(key)
    if not isinstance(listed, list | memoryview):
        return [fields.integer(key)] * blocks
    if len(listed) != blocks:
        raise fields.wrong(key, listed, f"a number, or a list of {blocks}")
    return [replace(fields, table={key: own}).integer(key) for own in listed]


def _olmo(fields: Fields, name: str, config: Mapping[str, Any], tensors: frozenset[str]) -> dict[str, Any]:
    """An OLMo 2 that has a window is an OLMo 3."""
    found = _attention_bias(fields, name, config, tensors)
    if not fields.table.get(f"{name}.attention.sliding_window"):
        return found
    other = {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    return found | other | _layers(fields, name, config["num_hidden_layers"])


def _exaone(fields: Fields, name: str, config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    key, blocks = f"{name}.attention.sliding_window", config["num_hidden_layers"]
    if blocks == _LARGEST[name]:
        fields = fields.with_defaults({key: _EXAONE_WINDOW})
    if fields.table.get(key):
        return _layers(fields, name, blocks)
    return {"sliding_window": None, "layer_types": ["full_attention"] * blocks}


def _ministral(fields: Fields, name: str, config: Mapping[str, Any], _tensors: frozenset[str]) -> dict[str, Any]:
    scaling = {"rope_type": "default", **config.get("rope_scaling", {})}
    beta = fields.optional_number(f"{name}.attention.temperature_scale")
    return {"rope_scaling": scaling | ({} if beta is None else {"llama_4_scaling_beta": beta})}


def _layers(fields: Fields, name: str, blocks: int) -> dict[str, Any]:
    """The window, and which blocks have it: a flag for each, or every so many have none."""
    key = f"{name}.attention.sliding_window_pattern"
    pattern = fields.table.get(key)
    if pattern is None or isinstance(pattern, int):
        interval = fields.integer(key, _INTERVALS[name])
        flags = [(block + 1) % interval != 0 for block in range(blocks)]
    else:
        flags = [bool(flag) for flag in pattern] if isinstance(pattern, list | memoryview) else []
        if len(flags) != blocks:
            raise fields.wrong(key, pattern, f"a number, or a list of {blocks} flags")
    types = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return {"sliding_window": fields.integer(f"{name}.attention.sliding_window"), "layer_types": types}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", windows=True, experts=True, pairs=True, options=_llama),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "olmoe": Architecture(model_type="olmoe", experts=True, options=_olmoe),
    "qwen2moe": Architecture(model_type="qwen2_moe", experts=True, options=_qwen2moe),
    "qwen3moe": Architecture(model_type="qwen3_moe", experts=True, options=_qwen3moe),
    "phi3": Architecture(model_type="phi3", windows=True),
    "command-r": Architecture(model_type="cohere", multipliers=MULTIPLIERS[-1:], options=_cohere),
    "cohere2": Architecture(model_type="cohere2", multipliers=MULTIPLIERS[-1:], windows=True, options=_cohere),
    "arcee": Architecture(model_type="arcee", pairs=True, options=_arcee),
    "apertus": Architecture(model_type="apertus", options=_apertus),
    "gemma": Architecture(model_type="gemma", options=_first_gemma),
    "gemma2": Architecture(model_type="gemma2", caps=CAPS, windows=True, options=_gemma),
    "gemma3": Architecture(model_type="gemma3_text", caps=CAPS[1:], windows=True, options=_gemma),
    "gemma3n": Architecture(model_type="gemma3n_text", caps=CAPS[1:], windows=True, widths=True, options=_gemma3n),
    "gemma4": Architecture(
        model_type="gemma4_text", caps=CAPS[1:], windows=True, wide=True, experts=True, options=_gemma4
    ),
    "olmo2": Architecture(model_type="olmo2", windows=True, options=_olmo),
    "exaone4": Architecture(model_type="exaone4", windows=True, options=_exaone),
    "glm4": Architecture(model_type="glm4", options=_glm),
    "glm4moe": Architecture(
        model_type="glm4_moe", experts=True, shared=True, post_norm="post_attention_norm", options=_glm4moe
    ),
    "deepseek2": Architecture(model_type="glm4_moe_lite", experts=True, shared=True, latent=True, options=_deepseek2),
    "gpt-oss": Architecture(
        model_type="gpt_oss", windows=True, experts=True, post_norm="post_attention_norm", options=_gpt_oss
    ),
    "mistral3": Architecture(model_type="ministral3", pairs=True, options=_ministral),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", options=_attention_bias),
    "qwen35": Architecture(model_type="qwen3_5_text", delta=True, post_norm="post_attention_norm", options=_qwen35),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text", delta=True, experts=True, post_norm="post_attention_norm", options=_qwen35
    ),
    "qwen3next": Architecture(model_type="qwen3_next", experts=True, post_norm="post_attention_norm", options=_qwen35),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid", multipliers=MULTIPLIERS, experts=True, pairs=True, options=_granite_hybrid
    ),
    "falcon-h1": Architecture(model_type="falcon_h1", options=_falcon),
    "nemotron_h": Architecture(model_type="nemotron_h", options=_nemotron),
    "nemotron_h_moe": Architecture(model_type="nemotron_h", experts=True, shared=True, options=_nemotron),
    "granite": Architecture(model_type="granite", multipliers=MULTIPLIERS, pairs=True, options=_granite),
    "granitemoe": Architecture(
        model_type="granitemoe", multipliers=MULTIPLIERS, experts=True, pairs=True, options=_granite
    ),
    "smollm3": Architecture(model_type="smollm3", pairs=True, options=_attention_bias),
    "seed_oss": Architecture(model_type="seed_oss", post_norm="post_attention_norm", options=_attention_bias),
    "lfm2": Architecture(model_type="lfm2", options=_lfm2),
    "lfm2moe": Architecture(model_type="lfm2_moe", experts=True, options=_lfm2moe),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe", experts=True, shared=True, options=_hunyuan_moe),
    "ernie4_5": Architecture(model_type="ernie4_5", options=_ernie),
    "ernie4_5-moe": Architecture(model_type="ernie4_5_moe", experts=True, shared=True, options=_ernie_moe),
}
"""Supported values of `general.architecture`. Mistral and Mixtral models call themselves llama, OLMo 3 olmo2."""
