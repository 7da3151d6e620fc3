"""config.json to ModelSpec: configs in the spellings they were published in, and everything that is refused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from models.errors import CheckpointError, UnsupportedModelError
from models.families import FAMILIES, spec_from_config, text_part
from models.families.fields import Fields
from models.spec import RopeSpec

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    """A small valid config of a family."""
    return {**TINY, "model_type": family, "architectures": [FAMILIES[family].architecture], **changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_2_as_published() -> None:
    spec = spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vocab_size": 32000,
        }
    )
    assert (spec.head_dim, spec.num_kv_heads, spec.max_context, spec.tied) == (128, 32, 4096, False)
    assert spec.rope == RopeSpec(theta=10000.0, rotary_dim=128)
    assert spec.windows == (None,) * 32
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.linear_shape("qkv") == (12288, 4096)


def test_llama_3_2_as_published() -> None:
    config = tiny(
        "llama",
        head_dim=64,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_scaling=LLAMA3_SCALING,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
    )
    spec = spec_from_config(config)
    assert spec.tied
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.rope == RopeSpec(
        theta=500000.0, rotary_dim=64, kind="llama3", factor=32.0, original_context=8192, low_freq_factor=1.0
    )


def test_phi_3_5_as_published() -> None:
    short, long = [1.0 + i / 100 for i in range(48)], [1.0 + i for i in range(48)]
    config = tiny(
        "phi3",
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        attention_bias=False,
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"long_factor": long, "short_factor": short, "type": "longrope"},
        sliding_window=262144,
    )
    spec = spec_from_config(config)
    assert spec.rope == RopeSpec(
        theta=10000.0,
        rotary_dim=96,
        kind="longrope",
        original_context=4096,
        short_factor=tuple(short),
        long_factor=tuple(long),
        attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
    )
    assert spec.windows == (262144,) * 4
    old_name = {**config, "rope_scaling": {**config["rope_scaling"], "type": "su"}}
    assert spec_from_config(old_name) == spec


def test_gemma_3_4b_as_published() -> None:
    """What is usual is left out of its text part, and the rest is of pictures."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    spec = spec_from_config(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert [layer for layer, window in enumerate(spec.windows) if window is None] == [5, 11, 17, 23, 29]
    assert spec.rope == RopeSpec(theta=1e6, rotary_dim=256, kind="linear", factor=8.0)
    assert spec.rope_of(0) == RopeSpec(theta=1e4, rotary_dim=256)
    assert (spec.activation, spec.score_cap, spec.logit_cap, spec.tied) == ("gelu_tanh", None, None, True)
    assert (spec.norm_eps, spec.eps_of("layers.3.q_norm")) == (1e-6 / 2560, 1e-6)
    assert spec.eos_token_ids == (1, 106)
    fields = Fields(table=text_part(config), source="config.json")
    assert FAMILIES[spec.family].multipliers(fields) == {"o_norm": 2560**-0.5, "down_norm": 2560**-0.5, "q_norm": 1.0}


@pytest.mark.parametrize("own", [{"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": None}])
def test_gemma_2b_as_published(own: dict[str, Any]) -> None:
    """The first configurations say gelu and mean its approximation; all leave out that the head is tied."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8}
    told = {"num_key_value_heads": 1, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    config = tiny("gemma", **sizes, **told, hidden_activation=None, rope_scaling=None, **own)
    spec = spec_from_config(without(config, "vocab_size"))
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.tied) == (1, 256, 256000, True)
    assert (spec.activation, spec.norm_after, spec.norm_eps) == ("gelu_tanh", False, 1e-6 / 2048)
    multipliers = FAMILIES["gemma"].multipliers(Fields(table=config, source="config.json"))
    assert multipliers == {"o": 2048**-0.5, "down": 2048**-0.5}


def test_gemma_2_has_caps_unless_told() -> None:
    spec = spec_from_config(tiny("gemma2"))
    assert (spec.score_cap, spec.logit_cap, spec.windows) == (50.0, 30.0, (4096, None, 4096, None))
    told = tiny("gemma2", attn_logit_softcapping=None, final_logit_softcapping=5)
    assert (spec_from_config(told).score_cap, spec_from_config(told).logit_cap) == (None, 5.0)


def test_yarn_sharpens_attention_unless_undone() -> None:
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8}
    assert spec_from_config(tiny("llama", rope_scaling=yarn)).rope.attention_factor == 1 + 0.1 * math.log(16)
    undone = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert spec_from_config(tiny("llama", rope_scaling=undone)).rope.attention_factor == 1.0


@pytest.mark.parametrize(("pattern", "whole"), [(2, [1, 3]), ("LLG", [2]), (None, [3])])
def test_exaone_4_rotates_where_it_has_windows(pattern: Any, whole: list[int]) -> None:
    spec = spec_from_config(tiny("exaone4", sliding_window=9, sliding_window_pattern=pattern))
    assert [layer for layer, window in enumerate(spec.windows) if window is None] == whole == list(spec.nope_layers)


def test_phi_4_mini_rotates_three_quarters_of_a_head() -> None:
    factors = [1.0] * 6
    config = tiny(
        "phi3",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
        rope_scaling={"long_factor": factors, "short_factor": factors, "type": "longrope", "attention_factor": 1.5},
    )
    spec = spec_from_config(config)
    assert (spec.head_dim, spec.rope.rotary_dim, spec.rope.attention_factor) == (16, 12, 1.5)


HALF = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 7}, (7,) * 4),
        *(
            (family, changes, windows)
            for family in ("qwen2", "qwen3")
            for changes, windows in (
                ({}, (None,) * 4),
                ({"sliding_window": 7, "max_window_layers": 0}, (None,) * 4),
                ({"use_sliding_window": True, "sliding_window": 7}, (None,) * 4),
                ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, (None, None, None, 7)),
                ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
                (HALF, (None, 7, None, 7)),
            )
        ),
    ],
)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_from_config(tiny(family, **changes)).windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "flags", "head_dim"),
    [
        ("llama", {}, (False, False, False, False), 16),
        ("llama", {"head_dim": None}, (False, False, False, False), 16),
        ("llama", {"attention_bias": True}, (True, True, False, False), 16),
        ("mistral", {}, (False, False, False, False), 16),
        ("qwen2", {}, (True, False, False, False), 16),
        ("qwen3", {}, (False, False, False, True), 128),
        ("qwen3", {"attention_bias": True, "head_dim": 32}, (True, True, False, True), 32),
        ("phi3", {}, (False, False, False, False), 16),
    ],
)
def test_biases_norms_and_heads(family: str, changes: dict[str, Any], flags: tuple[bool, ...], head_dim: int) -> None:
    spec = spec_from_config(tiny(family, **changes))
    assert (spec.family, spec.head_dim) == (family, head_dim)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == flags


def test_model_type_or_architecture_alone_suffices() -> None:
    assert spec_from_config(without(TINY, "architectures")).family == "llama"
    assert spec_from_config(without(TINY, "model_type")).family == "llama"
    assert spec_from_config(without(TINY, "num_key_value_heads")).num_kv_heads == 4


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        (2, 2, (2,)),
        ([2, 3], 5, (2, 3, 5)),
        (2, [3, 2, 1], (2, 3, 1)),
        (None, [7], (7,)),
        (-1, 4, (4,)),
    ],
)
def test_end_tokens_of_both_files_join(config_ids: Any, generation_ids: Any, expected: tuple[int, ...]) -> None:
    generation = None if generation_ids is None else {"eos_token_id": generation_ids, "bos_token_id": 9}
    spec = spec_from_config(tiny("llama", eos_token_id=config_ids), generation)
    assert spec.eos_token_ids == expected
    assert spec.bos_token_id == (None if generation is None else 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            tiny("gemma3_text", use_bidirectional_attention=True),
            ["use_bidirectional_attention is set", "generates text"],
        ),
        (
            {"model_type": "olmo", "architectures": ["OlmoForCausalLM"]},
            ["olmo", "OlmoForCausalLM", "nearest that is supported is olmo3", "Qwen3", "Phi-3"],
        ),
        ({"model_type": "gemma5_text"}, ["model_type 'gemma5_text'", "nearest that is supported is gemma4"]),
        (
            {
                "model_type": "gemma5",
                "architectures": ["Gemma5ForConditionalGeneration"],
                "text_config": {"model_type": "gemma5_text"},
            },
            ["Gemma5ForConditionalGeneration", "nearest that is supported is gemma4"],
        ),
        (
            {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]},
            ["(model_type 'rwkv'", "). Supported are Llama"],
        ),
        (
            tiny("granitemoehybrid", num_local_experts=0, time_step_limit=[0.0, 1.0]),
            ["Mamba-2", "limited to [0.0, 1.0]"],
        ),
        (
            tiny("hunyuan_v1_moe", num_experts=4, moe_topk=[1, 2, 1, 1]),
            ["'moe_topk' differs between blocks"],
        ),
        ({"model_type": "phi3small", "architectures": None}, ["phi3small", "Mistral"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"model_type": "mistral"}, ["LlamaForCausalLM", "mistral"]),
        ({"model_type": None, "architectures": None}, ["not given", "Llama 2/3"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq", "awq", "original"]),
        ({"num_local_experts": 8}, ["experts", "num_local_experts = 8"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, ["proportional", "yarn", "longrope"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["layer type"]),
    ],
)
def test_unsupported_models_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(tiny("llama") | changes, source="folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json")
    assert "\n" not in message
    for word in words:
        assert word in message


MIXED: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4}
"""Experts of GLM-4.5."""
GRANITE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENTS: dict[str, Any] = {
    **MIXED,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "q_lora_rank": 8,
}
ERNIE: dict[str, Any] = {"moe_intermediate_size": 16, "moe_k": 2, "moe_num_experts": 4}


def test_glm_4_5_has_experts_behind_its_first_blocks() -> None:
    spec = spec_from_config(tiny("glm4_moe", **MIXED, first_k_dense_replace=2, routed_scaling_factor=1.5))
    assert [spec.has_experts(layer) for layer in range(4)] == [False, False, True, True]
    assert spec.mixture is not None
    assert (spec.mixture.scoring, spec.mixture.scale, spec.mixture.num_experts, spec.mixture.scores) == (
        "sigmoid",
        1.5,
        5,
        4,
    )


def test_nemotron_3_nano_as_published() -> None:
    """A mixer and what follows it are a block, and what was read for config.json's numbers is of these."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    own = {
        "hidden_size": 2688,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 131072,
        "num_attention_heads": 32,
    }
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
    experts |= {"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5}
    spec = spec_from_config(
        tiny("nemotron_h", **own, **mamba, **experts, intermediate_size=1856, hybrid_override_pattern=pattern)
    )
    assert spec.num_layers == 29
    assert spec.attention_layers == tuple(
        block for block, own in enumerate(re.findall("[M*]E?", pattern)) if "*" in own
    )
    assert len(spec.bare) == 6
    assert 31.5e9 < spec.parameters < 31.6e9
    assert spec.mixture is not None
    assert (spec.mixture.shared, spec.mixture.num_experts, spec.mlp_parts) == (2, 130, 1)


def test_ernie_4_5_has_experts_in_every_so_many_blocks() -> None:
    spec = spec_from_config(tiny("ernie4_5_moe", **ERNIE, moe_layer_interval=2, moe_layer_start_index=2))
    assert [spec.has_experts(layer) for layer in range(4)] == [False, False, False, True]
    assert spec.tied


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("glm4_moe", {**MIXED, "n_group": 2}, r"n_group.*Choose another model\."),
        ("ernie4_5_moe", {**ERNIE, "use_bias": True}, r"use_bias.*Choose another model\."),
        ("ernie4_5_moe", {**ERNIE, "moe_norm_min": 0.5}, r"moe_norm_min.*Choose another model\."),
        ("deepseek_v2", {**LATENTS, "topk_method": "group_limited_greedy", "n_group": 2}, r"n_group.*another model\."),
        ("deepseek_v2", {**LATENTS, "norm_topk_prob": True}, r"norm_topk_prob.*another model\."),
        ("glm4_moe_lite", {**LATENTS, "rope_interleave": False}, r"rope_interleave.*another model\."),
        ("glm4_moe_lite", {**LATENTS, "attention_bias": True}, "attention_bias.*glm4_moe_lite"),
        ("nemotron_h", {"hybrid_override_pattern": "M--"}, "block 2 is 'mlp'.*another model"),
        ("nemotron_h", {"hybrid_override_pattern": "EM"}, "block 0 is 'moe'.*another model"),
        ("nemotron_h", {"hybrid_override_pattern": "ME", "moe_latent_size": 8}, "moe_latent_size.*another model"),
        ("nemotron_h", {"hybrid_override_pattern": "ME", "n_group": 2}, "n_group.*another model"),
        ("nemotron_h", {"hybrid_override_pattern": "M-", "mlp_hidden_act": "silu"}, "silu.*relu2"),
        ("nemotron_h", {"hybrid_override_pattern": "M-", "time_step_limit": [0.1, 1.0]}, "Mamba-2.*limited"),
        ("gemma3n_text", {"altup_active_idx": 1}, "altup_active_idx 0.*another model"),
        ("gemma3n_text", {"altup_correct_scale": False}, "altup_correct_scale true"),
        ("laguna", {"attention_bias": True}, "attention_bias.*laguna"),
        ("muse_glimmer_text", {"layer_rope_theta": [0, 5e5, 1e4, 1e4]}, "several bases are not supported"),
        ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping.*another model"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias.*another model"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate.*another model"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm.*another model"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act 'silu'.*relu2"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act 'relu2'.*silu"),
        ("mistral", {"attention_bias": True}, "attention_bias.*mistral"),
        ("phi3", {"attention_bias": True}, "attention_bias.*phi3"),
    ],
)
def test_other_routers_and_biases_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(tiny(family, **changes))


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *product(
            (*SIZES, "max_position_embeddings", "rms_norm_eps"), ["absent", None, 0, -4, "64", True, [64], 10**400]
        ),
        *product(SIZES, [10**9, 64.0]),
        ("rms_norm_eps", math.nan),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_missing_or_wrong_size_is_named(key: str, value: Any) -> None:
    config = without(TINY, key) if value == "absent" else {**TINY, key: value}
    with pytest.raises(CheckpointError, match=f"config.json: '{key}' is "):
        spec_from_config(config)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads.*divisor"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, "hidden_size.*multiple"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings.*true or false"),
        ("llama", {"hidden_act": 3}, "hidden_act.*string"),
        ("llama", {"eos_token_id": "2"}, "eos_token_id.*token id"),
        ("llama", {"rope_theta": math.inf}, "rope_theta.*above 0"),
        ("llama", {"rope_theta": math.nan}, "rope_theta.*above 0"),
        ("llama", {"rope_theta": 10**400}, "rope_theta.*above 0"),
        ("llama", {"rope_theta": 1e-300}, "rope_theta.*above 0"),
        ("llama", {"partial_rotary_factor": 1e308}, "partial_rotary_factor.*above 0"),
        ("llama", {"num_key_value_heads": 10**9}, "num_key_value_heads.*divisor"),
        ("llama", {"head_dim": 10**9}, "head_dim.*from 1 to 1,048,576"),
        ("llama", {"max_position_embeddings": 2**31}, "max_position_embeddings.*from 1 to 2,147,483,647"),
        ("llama", {"eos_token_id": [10**30]}, "eos_token_id.*token id"),
        ("llama", {"hidden_size": "9" * 10**7}, "hidden_size.*from 1 to"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling.*table"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: 'factor' is missing"),
        ("llama", {"rope_scaling": without(LLAMA3_SCALING, "factor")}, "'factor' is missing"),
        ("llama", {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "high_freq_factor.*above"),
        ("llama", {"head_dim": 15}, "even number"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7}}, "long_factor.*list of 8"),
        ("phi3", {"rope_scaling": without(LONGROPE, "short_factor")}, "short_factor.*missing"),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "short_factor.*above 0"),
        ("mistral", {"sliding_window": 0}, "sliding_window.*from 1 to"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types.*list of 4"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layer_types.*list of 4"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types.*use_sliding_window"),
        ("ministral", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "layer_types.*width"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers.*list of 4"),
        ("lfm2", {}, "norm_eps' is missing"),
        ("lfm2", {"norm_eps": 1e-5, "layer_types": ["conv", "sliding_attention"] * 2}, "layer_types.*list of 4"),
        ("lfm2", {"norm_eps": 1e-5, "full_attn_idxs": [4]}, "full_attn_idxs.*0 to 3"),
        ("lfm3", {"norm_eps": 1e-5, "layer_types": ["conv", "linear_attention"] * 2}, "layer_types.*sliding_attention"),
        ("laguna", {"num_key_value_heads": 2, "gating": "per-layer"}, "gating.*per-head"),
        ("laguna", {"num_key_value_heads": 2, "num_attention_heads_per_layer": [4, 4, 4, 3]}, "multiples of num_key_v"),
        ("laguna", {"num_key_value_heads": 2, "num_attention_heads_per_layer": 4}, "a list of 4"),
        (
            "laguna",
            {"num_key_value_heads": 2, "mlp_layer_types": ["dense"] * 3 + ["both"]},
            "mlp_layer_types.*dense or",
        ),
        ("falcon_h1", {"mamba_n_heads": 7}, "mamba_n_heads.*divisor"),
        ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups.*divisor"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern.*linear_attention"),
        ("nemotron_h", {"layers_block_type": "MM"}, "layers_block_type.*linear_attention"),
        ("nemotron_h", {"layers_block_type": [3]}, "layers_block_type.*linear_attention"),
        ("nemotron_h", {"hybrid_override_pattern": "M", "n_groups": 3}, "n_groups.*divisor"),
        ("nemotron_h", {"hybrid_override_pattern": "ME", "moe_shared_expert_intermediate_size": 9}, "multiple"),
        ("granite", {"embedding_multiplier": 0}, "embedding_multiplier.*above 0"),
        ("gemma", {"attention_bias": "no"}, "attention_bias.*true or false"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types.*list of 4"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 0}}},
            "full_attention: 'rope_theta'.*above",
        ),
        ("gemma3n_text", {"intermediate_size": [8, 8, 8]}, "intermediate_size.*list of 4"),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5] * 3 + [1.0]},
            "activation_sparsity_pattern.*below 1",
        ),
        ("gemma3n_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers.*so few"),
        ("gemma3n_text", {"altup_num_inputs": 9}, "altup_num_inputs.*from 1 to 8"),
        ("gemma3n_text", {"altup_num_inputs": 1}, "altup_num_inputs.*from 2 to 8"),
        ("gemma4_text", {"global_head_dim": 15}, "global_head_dim.*even"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers.*so few"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7}, "vocab_size_per_layer"),
        ("gemma4_text", {"per_layer_config": {"3": {"num_key_value_heads": 3}}}, "num_global_key_value_heads.*divisor"),
        ("gemma4_text", {"enable_moe_block": True}, "top_k_experts' is missing"),
        ("olmo3", {"sliding_window": 0}, "sliding_window.*from 1 to"),
        ("exaone4", {"sliding_window": 4, "sliding_window_pattern": "LGL"}, "sliding_window_pattern.*whole number"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -2}}, "alpha.*above 0"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 40.0}}, "beta_slow.*below beta_f"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
        ("glm4_moe", {**MIXED, "num_experts_per_tok": 5}, r"at most n_routed_experts \(4\)"),
        ("glm4_moe", {**MIXED, "n_shared_experts": -1}, "n_shared_experts"),
        ("ernie4_5_moe", {**ERNIE, "moe_layer_end_index": "all"}, "moe_layer_end_index.*number of a layer"),
        ("granitemoeshared", {**GRANITE, "shared_intermediate_size": 97}, "multiple"),
    ],
)
def test_a_contradiction_is_named(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        spec_from_config(tiny(family) | changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_generation_config_is_named_where_it_is_wrong() -> None:
    with pytest.raises(CheckpointError, match=r"^f/generation_config\.json: 'eos_token_id'"):
        spec_from_config(TINY, {"eos_token_id": "x"}, source="f/config.json")


def test_no_name_in_a_config_makes_a_message_endless() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^config\.json: hidden_act 'aaa.* … .*Choose another model\.$"
    ) as raised:
        spec_from_config({**TINY, "hidden_act": "a" * 10**7})
    assert len(str(raised.value)) < 2100


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, models.families, models.rope; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
