"""GGUF files as checkpoints: round trips of every architecture, and one-sentence errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.checkpoint_files import GENERATION_CONFIG
from models.errors import CheckpointError, QuantizationError, UnsupportedModelError
from models.export.export import export
from models.families import FAMILIES
from models.gguf.architectures import ARCHITECTURES
from models.gguf.checkpoint import read_gguf
from models.gguf.header import TensorInfo, part_names, read_header
from models.gguf.tensors import GgufTensor, name_in_file
from models.oracle import Oracle
from models.quantize import keeping, kept_by_default, quantize
from models.quantizers.dequantize import dequantize
from models.recipe import FLOATS, GGUF_GROUPS, KEPT_BITS, SUPER_GROUP, TWO_LEVELS, Recipe
from models.store import Store
from models.store.store import default_name
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.linear import dequantize as dequantize_torch
from runtime.load.plan import open_decoder
from runtime.text.tokenizer import Tokenizer
from tests.close import Tolerance, assert_close
from tests.grid import grid
from tests.models.gguf.making import SIZES, drawn_blocks, names_of, quantized, random_model, write_gguf, write_part
from tests.models.kept import check_logits
from tests.models.random_models import (
    CAPS,
    DELTA,
    FALCON,
    GEMMA,
    GEMMA3N,
    GEMMA4,
    GRANITE,
    GRANITE4_H,
    LAYERED_ROPE,
    LLAMA3_ROPE,
    MINISTRAL3,
    NEMOTRON,
    OF_GEMMA4,
    SHARING,
    VALUES_OF_GEMMA4,
    YARN,
    longrope,
)

LONGROPE = longrope(6, partial_rotary_factor=0.75, original_max_position_embeddings=16)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_LATENTS = {
    **ROUTED,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
OF_FALCON = {
    **{key: value for key, value in FALCON.items() if "multiplier" not in key},  # files have multiplied weights
    "mamba_d_ssm": 96,
    "mamba_d_head": 16,
}
OF_GRANITE4 = {
    **GRANITE4_H,
    "layer_types": ["mamba", "attention"],
    "hidden_size": 64,
    "mamba_n_heads": 4,
    "shared_intermediate_size": 96,
}
MIXED = ["sliding_attention", "full_attention"]
GEMMA_CASE = {**{key: value for key, value in GEMMA.items() if key != "query_pre_attn_scalar"}, "layer_types": MIXED}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": ("Gemma2", {**GEMMA_CASE, **CAPS, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {**GEMMA_CASE, "query_pre_attn_scalar": 16, "rope_parameters": LAYERED_ROPE}),
    "gemma3n": (
        "Gemma3n",
        {
            **GEMMA3N,
            "laurel_rank": 64,  # which no file says
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 64,
            "intermediate_size": [96, 64, 96, 32],
            "layer_types": [*MIXED, *MIXED],
        },
    ),
    "gemma4-shared": (
        "Gemma4",
        {
            **GEMMA4,
            **SHARING,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 64,
            "global_head_dim": 32,
            "layer_types": [*MIXED, *MIXED],
        },
    ),
    "gemma4-values": (
        "Gemma4",
        {**GEMMA4, **VALUES_OF_GEMMA4, "global_head_dim": 32, "layer_types": [*MIXED, *MIXED]},
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            **GEMMA4,
            **OF_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 32,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "layer_types": MIXED,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": MIXED, "head_dim": 12}),
    "exaone4-whole": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "head_dim": 16,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {**ROUTED, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "head_dim": 16},
    ),
    "glm4-moe-biases": (
        "Glm4Moe",
        {
            **ROUTED,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "norm_topk_prob": False,
            "partial_rotary_factor": 1.0,
            "head_dim": 32,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**OF_LATENTS, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}, "first_k_dense_replace": 1},
    ),
    "glm4-flash": ("Glm4MoeLite", {**OF_LATENTS, "q_lora_rank": 32, "routed_scaling_factor": 1.5}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "head_dim": 16, "moe_layer_interval": 2},
    ),
    "qwen3.5": ("Qwen3_5", {**DELTA, "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3.5-even": (
        "Qwen3_5",
        {
            **DELTA,
            "linear_num_key_heads": 4,
            "layer_types": ["full_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **DELTA,
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
        },
    ),
    "granite": ("Granite", {**GRANITE, "attention_bias": True}),
    "granite-moe": ("GraniteMoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 192},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "lfm2": ("Lfm2", {"norm_eps": 0.01, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2-biases": (
        "Lfm2",
        {
            "layer_types": ["full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {**EXPERTS, "norm_eps": 0.01, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granite4-h": ("GraniteMoeHybrid", {**OF_GRANITE4, "num_local_experts": 0, "mamba_proj_bias": True}),
    "granite4-h-moe": (
        "GraniteMoeHybrid",
        {**OF_GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "falcon-h1": ("FalconH1", {**OF_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon-h1-plain": ("FalconH1", {**OF_FALCON, "mamba_norm_before_gate": False, "mamba_conv_bias": False}),
    "nemotron-h": (
        "NemotronH",
        {**NEMOTRON, "mamba_head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    ),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **NEMOTRON,
            **ROUTED,
            "mamba_head_dim": 32,
            "moe_shared_expert_intermediate_size": 64,
            "intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        },
    ),
    "cohere": ("Cohere", {"attention_bias": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "num_hidden_layers": 5, "logit_scale": 0.5}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3_ROPE}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 5}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "tie_word_embeddings": True, "original_max_position_embeddings": 16},
    ),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model("Llama")


def test_recommended_sampling_is_kept(tmp_path: Path, llama: Any) -> None:
    metadata = {"general.sampling.temp": 0.25, "general.sampling.top_k": 20}
    files = [read_gguf(write_gguf(tmp_path / "model.gguf", llama, metadata=one)) for one in ({}, metadata)]
    assert GENERATION_CONFIG not in files[0].configuration
    assert json.loads(files[1].configuration[GENERATION_CONFIG]) == {"temperature": 0.25, "top_k": 20}


@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_back_as_from_its_folder(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path / "folder")
    folder = Checkpoint.open(tmp_path / "folder")
    file = Checkpoint.open(write_gguf(tmp_path / "model.gguf", model))
    assert torch.equal(file.embedding(), folder.embedding())
    for name in (*folder.spec.vector_names(), *folder.spec.router_names()):
        assert torch.equal(file.vector(name), folder.vector(name))
    for name in folder.spec.linear_names():
        for ours, theirs in zip(file.linear(name), folder.linear(name), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
    if "rope" not in str(changes):  # tables of factors stand for what made them
        assert file.spec == replace(folder.spec, family="llama" if case == "mistral" else folder.spec.family)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.std() > 0.3
    assert_close(Oracle(file).logits(tokens), expected, "model")


def test_qwen3_next_may_be_as_earlier_converters_left_it(tmp_path: Path) -> None:
    family, changes = CASES["qwen3-next"]
    model = random_model(family, **changes)
    whole = model.state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"].numpy()
    divided = ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight")
    older = write_gguf(tmp_path / "older.gguf", model, left_out=divided, extra={"blk.0.ssm_in.weight": whole})
    files = [Checkpoint.open(path) for path in (older, write_gguf(tmp_path / "newer.gguf", model))]
    assert torch.equal(*(file.linear("layers.0.qkv")[0] for file in files))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_type_of_the_weights_is_known(kind: str, llama: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "model.gguf", llama, kind=kind))
    weights = sum(tensor.numel() for tensor in llama.state_dict().values() if tensor.ndim > 1)
    assert checkpoint.files.types == {kind: weights}
    weight, _ = checkpoint.linear("layers.1.down")
    assert weight.dtype == (torch.bfloat16 if kind == "BF16" else torch.float16)
    expected = llama.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert_close(weight.float(), expected, Tolerance(span=0.1, why="a step of four bits"))


@pytest.mark.parametrize("end", ["<|im_end|>", "<|END_OF_TURN_TOKEN|>", "<|assistant_end|>", "<|tools_suffix|>"])
def test_the_configuration_names_ends_that_the_file_does_not(llama: Any, end: str, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", end, "Ġ", *(f"[PAD{index}]" for index in range(5, 64))]
    kinds = [3, 3, 3, 3, *([1] * 60)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 4}
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "model.gguf", llama, metadata=metadata))
    assert checkpoint.spec.eos_token_ids == (2, 4, 3)
    assert checkpoint.spec.bos_token_id == 1


@pytest.mark.parametrize("number", [64, 2**32 - 1, "x"])
@pytest.mark.parametrize("key", ["padding_token_id", "unknown_token_id", "seperator_token_id", "mask_token_id"])
def test_a_token_that_nothing_uses_may_have_any_number(key: str, number: Any, llama: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, metadata={f"tokenizer.ggml.{key}": number})
    assert Checkpoint.open(file).spec.bos_token_id == 1
    assert Tokenizer(file).bos_token_id == 1


def test_names_are_those_of_the_package() -> None:
    for name, architecture in ARCHITECTURES.items():
        if name.startswith("nemotron_h"):
            continue  # the package knows NVIDIA's names, and which of four a block is decides about them
        family, names = FAMILIES[architecture.model_type], names_of(name, 7)
        kinds = (
            ("qkv", "o") if architecture.experts and name != "llama" else ("qkv", "o", "gate_up", "down")
        )  # experts alone
        sources = [family.linear_sources[kind] for kind in kinds]
        sources += [own[kind] for own in family.mixer_sources.values() for kind in ("qkv", "o", "conv") if kind in own]
        if name not in ("olmo2", "exaone4"):
            sources.append((family.norms["input_norm"],))
        in_blocks = [f"model.layers.6.{module}.weight" for modules in sources for module in modules]
        for own in ("model.embed_tokens.weight", f"{family.last_norm}.weight", *in_blocks):
            assert name_in_file(own, name, family) == names(own)


def test_rotating_channels_come_back_to_the_last_one(tmp_path: Path) -> None:
    """30 / 44 of 44 channels, cut to a whole number, would be 29."""
    model = random_model("Phi3", hidden_size=176, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    file = write_gguf(tmp_path / "model.gguf", model, metadata={"phi3.rope.dimension_count": 30})
    assert Checkpoint.open(file).spec.rope.rotary_dim == 30


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "olmo"}, "'olmo' is not supported.* The nearest .* is olmo3"),
    "adapter": ({"general.type": "adapter"}, "no model, but 'adapter'"),
    "experts": ({"llama.expert_shared_count": 1}, "'llama.expert_shared_count' is 1"),
    "softcap": ({"llama.attn_logit_softcapping": 50.0}, "softcapping' is 50.0"),
    "scaling": ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 4.0}, "rotary scaling 'su'"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "martian"}, "the pre-tokenizer 'martian'"),
    "values": ({"llama.attention.value_length": 8}, "keys of 16 and values of 8"),
    "partial": ({"llama.rope.dimension_count": 8}, "of which 8 rotate"),
}
"""What is not run here."""


@pytest.mark.parametrize(("case", "architecture"), [("glm4-moe", "glm4moe"), ("qwen3.5", "qwen35")])
def test_the_last_block_may_predict_further_tokens(case: str, architecture: str, tmp_path: Path) -> None:
    changes = {**CASES[case][1], "num_hidden_layers": 3}
    if "layer_types" in changes:
        changes["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
    model = random_model(CASES[case][0], **changes)
    whole = Checkpoint.open(write_gguf(tmp_path / "whole.gguf", model))
    C, V = whole.spec.hidden_size, whole.spec.vocab_size
    shapes = {"eh_proj": (C, 2 * C), "enorm": (C,), "hnorm": (C,), "shared_head_norm": (C,), "shared_head_head": (V, C)}
    rng = np.random.default_rng(0)
    extra = {f"blk.2.nextn.{name}.weight": rng.random(shape, np.float32) for name, shape in shapes.items()}
    metadata = {f"{architecture}.nextn_predict_layers": 1}
    further = Checkpoint.open(write_gguf(tmp_path / "further.gguf", model, metadata=metadata, extra=extra))
    assert further.spec.num_layers == 2
    mtp = further.mtp()
    assert mtp is not None
    assert whole.mtp() is None
    for name in ("layers.0.qkv", "layers.0.o"):
        assert torch.equal(mtp.linear(name)[0], whole.linear(name.replace("0", "2"))[0])
    assert torch.equal(mtp.linear("head")[0], whole.linear("head")[0])
    for name, own in (
        ("layers.0.embed_norm", "enorm"),
        ("layers.0.hidden_norm", "hnorm"),
        ("norm", "shared_head_norm"),
    ):
        assert np.array_equal(mtp.vector(name).numpy(), extra[f"blk.2.nextn.{own}.weight"])
    assert np.array_equal(mtp.linear("layers.0.join.down")[0].numpy(), extra["blk.2.nextn.eh_proj.weight"])


@pytest.mark.parametrize(("case", "tensor"), [("gpt-oss", "attn_sinks.weight"), ("glm4-moe", "exp_probs_b.bias")])
def test_missing_vectors_are_named_as_in_the_file(case: str, tensor: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    file = write_gguf(tmp_path / "model.gguf", random_model(family, **changes), left_out=(f"blk.1.{tensor}",))
    with pytest.raises(CheckpointError, match=rf"'blk\.1\.{tensor}' is missing"):
        Checkpoint.open(file)


def test_a_mixture_needs_no_width_of_an_mlp(tmp_path: Path) -> None:
    metadata = {"qwen35moe.feed_forward_length": None}
    file = write_gguf(tmp_path / "model.gguf", random_model("Qwen3_5Moe", **CASES["qwen3.5-moe"][1]), metadata=metadata)
    spec = Checkpoint.open(file).spec
    assert spec.mixture is not None
    assert spec.intermediate_size == spec.mixture.width == 32


@pytest.mark.parametrize(("key", "value"), [("inner_size", 33), ("time_step_rank", 3), ("group_count", 0)])
def test_value_heads_that_do_not_divide_are_named(key: str, value: int, tmp_path: Path) -> None:
    metadata = {f"qwen35.ssm.{key}": value}
    file = write_gguf(tmp_path / "model.gguf", random_model("Qwen3_5", **CASES["qwen3.5"][1]), metadata=metadata)
    with pytest.raises(CheckpointError, match=rf"qwen35\.ssm\.(inner_size|{key})'? is"):
        Checkpoint.open(file)


def test_latents_in_files_from_before_llama_cpp_kept_them(tmp_path: Path) -> None:
    model = random_model("DeepseekV2", **CASES["deepseek-v2"][1])
    whole = Checkpoint.open(write_gguf(tmp_path / "whole.gguf", model))
    lengths = {"key_length": 40, "value_length": 16, "key_length_mla": None, "value_length_mla": None}
    metadata = {f"deepseek2.attention.{key}": value for key, value in lengths.items()}
    extra = {
        f"blk.{layer}.attn_kv_b.weight": block.self_attn.kv_b_proj.weight.detach().numpy()
        for layer, block in enumerate(model.model.layers)
    }
    left_out = tuple(f"blk.{layer}.attn_{part}_b.weight" for layer in range(2) for part in "kv")
    file = write_gguf(tmp_path / "old.gguf", model, metadata=metadata, left_out=left_out, extra=extra)
    older = Checkpoint.open(file)
    assert older.spec == whole.spec
    assert torch.equal(older.linear("layers.1.qkv")[0], whole.linear("layers.1.qkv")[0])
    assert torch.equal(older.linear("layers.1.o")[0], whole.linear("layers.1.o")[0])


def test_another_router_is_refused(tmp_path: Path) -> None:
    metadata = {"glm4moe.expert_gating_func": 1}
    file = write_gguf(tmp_path / "model.gguf", random_model("Glm4Moe", **CASES["glm4-moe"][1]), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func' is 1"):
        Checkpoint.open(file)


@pytest.fixture
def parts(llama: Any, tmp_path: Path) -> list[Path]:
    """A model in three files, as llama.cpp would write it; model.gguf beside them is the whole."""
    whole = read_header(write_gguf(tmp_path / "model.gguf", llama))
    paths = [tmp_path / name for name in part_names("tiny-F32-00001-of-00003.gguf")]
    for number, path in enumerate(paths):
        write_part(path, whole, number, len(paths))
    return paths


@pytest.mark.parametrize("given", range(3))
def test_parts_are_read_as_one_whichever_is_given(given: int, parts: list[Path]) -> None:
    whole, joined = Checkpoint.open(parts[0].with_name("model.gguf")), Checkpoint.open(parts[given])
    assert joined.spec == whole.spec
    assert joined.files.weights == tuple(parts)
    assert joined.files.path == parts[0]
    for name in whole.spec.linear_names():
        assert torch.equal(joined.linear(name)[0], whole.linear(name)[0])
    assert default_name(parts[given], Recipe(method="rtn", bits=3)) == "tiny-F32-rtn-3bit"


def test_a_part_that_is_missing_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts .* missing: tiny-F32-00002-of-00003\.gguf\."):
        Checkpoint.open(parts[0])


def test_a_part_with_another_name_cannot_be_placed(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("model-1.gguf"))
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*NAME-00001-of-00003\.gguf"):
        Checkpoint.open(other)


def test_a_part_in_the_place_of_another_is_noticed(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="is not part 2 of 3"):
        Checkpoint.open(parts[0])


@pytest.mark.parametrize(("of", "said"), [(1, "is not part 3 of 3"), (2, "3 parts hold .* tensors, not")])
def test_a_part_of_another_model_is_noticed(of: int, said: str, parts: list[Path]) -> None:
    write_part(parts[2], read_header(parts[of]), 2, 3)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(parts[0])


def test_windows_of_qwen_are_not_guessed(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("Qwen2"), metadata={"qwen2.attention.sliding_window": 8})
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        Checkpoint.open(file)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"llama.embedding_length": None}, "'llama.embedding_length' is missing"),
    "text": ({"llama.block_count": "two"}, "'llama.block_count' is 'two'"),
    "by-layer": ({"llama.attention.head_count": [4, 4]}, r"head_count' is \[4, 4\]"),
    "nothing-said": ({"general.architecture": None}, "'general.architecture' is missing"),
    "heads": ({"llama.attention.head_count_kv": 3}, "num_key_value_heads"),
    "widths": ({"llama.feed_forward_length": [96, 64]}, "the same in all blocks that have an MLP"),
    "words for widths": ({"llama.feed_forward_length": ["a", "b"]}, "the same in all blocks that have an MLP"),
    "no-tokens": ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
    "token-types": ({"tokenizer.ggml.token_type": [1, 1]}, "64 tokens and 2 types"),
    "more-tokens": (
        {"tokenizer.ggml.tokens": ["a"] * 65, "tokenizer.ggml.token_type": [1] * 65},
        "65 tokens and embeddings for 64",
    ),
    "no-kind": ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is missing"),
    "bos": ({"tokenizer.ggml.bos_token_id": 64}, "one of 64 tokens"),
    "wider": (
        {"llama.embedding_length": 128, "llama.attention.key_length": 16},
        r"token_embd.weight' has shape \[64, 64\]",
    ),
    "shorter": ({"llama.block_count": 1}, "blk.1.attn_q.weight' does not belong in a llama model of 1 layers"),
    "longer": ({"llama.block_count": 3}, "blk.2.attn_norm.weight' is missing"),
    "absurd": ({"llama.block_count": 2**32 - 1}, "block_count"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count' is 0"),
    "no layers": ({"llama.block_count": 0}, "block_count' is 0"),
    "no context": ({"llama.context_length": 0}, "context_length' is 0"),
    "wide heads": ({"llama.attention.key_length": 2**32 - 1}, "key_length"),
    "no rotation": ({"llama.rope.freq_base": math.nan}, "freq_base' is nan"),
    "endless rotation": ({"llama.rope.freq_base": 3e38}, "freq_base' is .*e.38"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon' is 0.0"),
    "a list for a number": ({"llama.embedding_length": list(range(10_000))}, r"\[0, 1, 2, 3, 4, 5, \.\.\.\]"),
    "a window of flags": ({"llama.attention.sliding_window": [True] * 9}, "sliding_window"),
}


@pytest.mark.parametrize(
    ("kind", "metadata", "said"),
    [
        *((CheckpointError, *case) for case in WRONG.values()),
        *((UnsupportedModelError, *case) for case in FOREIGN.values()),
    ],
    ids=[*WRONG, *FOREIGN],
)
def test_metadata_that_cannot_be_or_is_not_run_here(
    kind: type[Exception], metadata: dict[str, Any], said: str, llama: Any, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, metadata=metadata)
    with pytest.raises(kind, match=said) as raised:
        Checkpoint.open(file)
    assert str(file) in str(raised.value)
    assert "config.json" not in str(raised.value)


@pytest.mark.parametrize("size", [1, 9, 70_000])
def test_a_table_of_rotary_factors_of_a_wrong_size(size: int, llama: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, extra={"rope_freqs.weight": np.ones(size, np.float32)})
    with pytest.raises(CheckpointError, match=r"a list of 8 numbers|has 70,000 numbers"):
        Checkpoint.open(file)


NINES = f"blk.{'9' * 5000}.attn_q.weight"


@pytest.mark.parametrize("name", ["blk.01.attn_q.weight", NINES, "blk.٣.attn_q.weight"], ids=["01", "nines", "arabic"])
def test_a_block_with_an_odd_number_has_no_place(name: str, llama: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, extra={name: np.ones((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match="does not belong in a llama model"):
        Checkpoint.open(file)


def test_a_missing_tensor_has_the_file_s_own_name(llama: Any, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", llama, left_out=("blk.1.ffn_gate.weight",))
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_gate\.weight' is missing from model\.gguf"):
        Checkpoint.open(file)


def test_an_unknown_tensor(llama: Any, tmp_path: Path) -> None:
    model = random_model("Qwen3", head_dim=16)
    file = write_gguf(tmp_path / "model.gguf", model, metadata={"general.architecture": "qwen3"})
    assert Checkpoint.open(file).spec.qk_norm
    metadata = {key.replace("qwen3", "llama"): value for key, value in _described(file).items()}
    renamed = write_gguf(tmp_path / "renamed.gguf", model, metadata={**metadata, "general.architecture": "llama"})
    with pytest.raises(CheckpointError, match=r"attn_.*_norm\.weight' does not belong in a llama model"):
        Checkpoint.open(renamed)


def _described(file: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(file).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("qwen3.")}


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "a-Q4_K_M.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a-Q4_K_M\.gguf"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SIZES)
    )
    with pytest.raises(CheckpointError, match=r"a-Q4_K_M\.gguf"):
        Checkpoint.open(tmp_path)


@pytest.mark.data
def test_logits_of_smollm2_equal_those_of_the_converted_folder(smollm2_gguf: Path, smollm2_hf: Path) -> None:
    ours, theirs = Checkpoint.open(smollm2_gguf), Checkpoint.open(smollm2_hf)
    tokens = torch.randint(0, 49152, (1, 48), generator=torch.Generator().manual_seed(0))
    found, expected = Oracle(ours, resident=False).logits(tokens), Oracle(theirs, resident=False).logits(tokens)
    assert expected.std() > 1
    assert float((found - expected).abs().max()) <= 1e-3


def _in_file(model: Any, name: str, kinds: dict[str, str], kind: str) -> np.ndarray[Any, Any]:
    """What a file of these types holds of a linear layer, float32; rows are quantized one by one, in any order."""
    if name == "head":
        parts = {"output": "lm_head.weight"}
    else:
        block, layer = name.rsplit(".", 1)
        qkv, mlp = {f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"}, {p: f"mlp.{p[4:]}_proj" for p in _MLP}
        o, down = {"attn_output": "self_attn.o_proj"}, {"ffn_down": "mlp.down_proj"}
        own = {"qkv": qkv, "o": o, "gate_up": mlp, "down": down}
        number = block.split(".")[1]
        parts = {f"blk.{number}.{ours}": f"model.{block}.{theirs}.weight" for ours, theirs in own[layer].items()}
    found = []
    for ours, theirs in parts.items():
        dtype = gguf.GGMLQuantizationType[kinds.get(f"{ours}.weight", kind)]
        weight = model.state_dict()[theirs].numpy()
        found.append(gguf.dequantize(quantized(weight, dtype), dtype))
    return np.concatenate(found)


_MLP = ("ffn_gate", "ffn_up")
_WIDE = {"hidden_size": 256, "intermediate_size": 256}
_FUSED_K = {
    "blk.0.attn_v.weight": "Q6_K",
    "blk.1.attn_v.weight": "Q5_K",
    "blk.1.ffn_down.weight": "Q6_K",
    "output.weight": "Q6_K",
}
_FUSED_5 = {
    "blk.0.attn_v.weight": "Q8_0",
    "blk.1.attn_v.weight": "Q5_1",
    "blk.0.ffn_up.weight": "Q4_0",
    "blk.1.ffn_up.weight": "Q5_1",
    "blk.1.ffn_gate.weight": "Q4_1",
    "output.weight": "Q8_0",
}
_FUSED = {"blk.0.attn_q.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_1", "blk.1.attn_output.weight": "Q8_0"}


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize(
    ("kind", "kinds", "bits"),
    [
        *((kind, {}, KEPT_BITS[kind]) for kind in GGUF_GROUPS),
        ("Q4_0", _FUSED, 4),
        ("Q5_0", _FUSED_5, 5),
        ("Q4_K", _FUSED_K, 4),
        ("Q5_K", {}, 6),
    ],
    ids=[*GGUF_GROUPS, "fused", "fused-5", "Q4_K_M", "Q5_K"],
)
def test_low_bit_weights_are_kept_bit_for_bit(
    tmp_path: Path, family: str, kind: str, kinds: dict[str, str], bits: int
) -> None:
    model = random_model(family, **(_WIDE if kind in (*TWO_LEVELS, "Q5_K") else {}))
    recipe = keeping(write_gguf(tmp_path / "model.gguf", model, kind=kind, kinds=kinds))
    assert recipe is not None
    assert recipe.bits == bits
    store = Store(tmp_path / "store")
    name = quantize(tmp_path / "model.gguf", store, recipe).name
    assert name == "model-kept"
    stored = store.open(name)
    assert stored.recipe == recipe
    assert stored.info.summary.residual_bytes == 0
    checkpoint = Checkpoint.open(tmp_path / "model.gguf")
    for layer in stored.spec.linear_names():
        linear, expected = stored.linear(layer), _in_file(model, layer, kinds, kind)
        assert np.array_equal(dequantize(linear), expected)
        assert np.array_equal(dequantize_torch(linear).numpy(), expected)
        bias = checkpoint.linear(layer)[1]
        assert (linear.bias is None) == (bias is None)
        assert bias is None or np.array_equal(np.asarray(linear.bias), bias.numpy())
    if kind in (*TWO_LEVELS, "Q5_K", FLOATS):
        with pytest.raises(UnsupportedModelError, match="use that"):
            export(stored, tmp_path / "again.gguf", "gguf")
        return
    export(stored, tmp_path / "again.gguf", "gguf")
    again, tensors = (read_header(tmp_path / f"{own}.gguf").tensors for own in ("again", "model"))
    with pytest.raises(UnsupportedModelError, match="has the weights of its source"):
        export(stored, tmp_path / "folder", "awq")
    for own, info in tensors.items():
        if info.kind == again[own].kind and own != "token_embd.weight":
            stretches = [np.memmap(each.path, np.uint8, "r", each.offset, (each.size,)) for each in (info, again[own])]
            assert np.array_equal(*stretches), own
        else:
            assert own == "token_embd.weight" or kinds


@pytest.mark.parametrize("kind", sorted(TWO_LEVELS))
def test_the_largest_and_smallest_factors_are_exact(tmp_path: Path, kind: str) -> None:
    (tmp_path / "blocks").write_bytes(drawn_blocks(64, kind, 0, [0.0, -0.0, 6e-8, -6e-8, 2047, -2047, 1]).tobytes())
    stored = np.fromfile(tmp_path / "blocks", np.uint8).reshape(4, -1)
    info = TensorInfo(path=tmp_path / "blocks", name="x", kind=kind, shape=(4, 4096), offset=0, size=stored.size)
    own = GgufTensor(info=info).lattice()
    assert own.minimums is not None
    assert own.group_scales is not None
    assert own.group_minimums is not None
    scales, minimums = (
        halves.astype(np.float32).repeat(SUPER_GROUP // GGUF_GROUPS[kind], axis=1) * groups
        for halves, groups in ((own.scales, own.group_scales), (own.minimums, own.group_minimums))
    )
    found = own.codes.reshape(4, -1, GGUF_GROUPS[kind]) * scales[..., None] + minimums[..., None]
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found.reshape(4, -1), expected)
    assert np.abs(expected).max() > 1e5
    beyond = drawn_blocks(64, kind, 0, [np.nan if kind == "Q4_K" else 2048])
    (tmp_path / "blocks").write_bytes(beyond.tobytes())
    with pytest.raises(CheckpointError, match="scales of 'x' are NaN, infinite or too large"):
        GgufTensor(info=info).lattice()


def test_a_file_of_two_levels_answers_as_what_it_holds(tmp_path: Path) -> None:
    """Logits on the processor are those of the dequantized model, but for caches and activations of 8 bits."""
    model = random_model("Llama", **_WIDE)
    for name, norm in model.named_parameters():
        if name.endswith("layernorm.weight"):
            norm.data *= 10  # drawn blocks are small
    file = write_gguf(tmp_path / "model.gguf", model, kind="Q4_K", kinds=_FUSED_K | {"token_embd.weight": "F16"})
    tokens = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    state = model.state_dict()
    state["model.embed_tokens.weight"].copy_(state["model.embed_tokens.weight"].half())
    for names, own in _parts_of_model(model):
        found = torch.from_numpy(_in_file(model, own, _FUSED_K, "Q4_K"))
        for name, rows in zip(names, found.split([len(state[name]) for name in names]), strict=True):
            state[name].copy_(rows)
    expected = model(tokens).logits[0].detach().numpy()
    store = Store(tmp_path / "store")
    recipe = kept_by_default(file)
    assert recipe is not None
    stored = store.open(quantize(file, store, recipe).name)
    for backend, allowed in (("reference", 3e-3), ("cpu", 0.03)):
        decoder, _ = open_decoder(stored, DecoderOptions(context=64, max_rows=16, kv="fp16", threads=1), backend)
        steps = [Step.of(tokens[0, :16].numpy()), *(Step.of(tokens[0, [at]].numpy(), at) for at in range(16, 20))]
        apart = np.concatenate([decoder.forward(step).copy() for step in steps]) - expected
        decoder.close()
        assert np.sqrt(np.mean(apart**2)) < allowed * expected.std(), backend


def _parts_of_model(model: Any) -> list[tuple[list[str], str]]:
    """Names of weights in transformers' model by those of linear layers."""
    kinds = {"qkv": [f"self_attn.{p}_proj" for p in "qkv"], "o": ["self_attn.o_proj"]}
    kinds |= {"gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    blocks = range(model.config.num_hidden_layers)
    own = [
        ([f"model.layers.{i}.{module}.weight" for module in modules], f"layers.{i}.{kind}")
        for i in blocks
        for kind, modules in kinds.items()
    ]
    return [*own, (["lm_head.weight"], "head")]


KEPT = [*(("mixtral", kind) for kind in GGUF_GROUPS), ("gemma3n", "Q4_0"), ("gemma4-shared", "Q4_0")]


@pytest.mark.parametrize("made", grid(KEPT, {("mixtral", "Q4_K"), ("gemma3n", "Q4_0")}), ids="-".join)
def test_what_most_weights_are_is_kept(tmp_path: Path, made: tuple[str, str]) -> None:
    """Experts, or attention and MLP where other matrices are multiplied or in other types, bit for bit.

    Logits on the processor are those of the reference, but for activations of 8 bits.
    """
    case, kind = made
    family, changes = CASES[case]
    model = random_model(family, **changes, **(_WIDE if kind in TWO_LEVELS else {}))
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    stored = Store(tmp_path / "store").open(quantize(file, Store(tmp_path / "store"), keeping(file)).name)
    assert (case != "mixtral") == ("beside attention and MLP, " in str(stored.info.summary.warning))
    names = [name for name in stored.spec.linear_names() if ".experts." in name or name.count(".") == 2]
    assert {stored.recipe.types[name] for name in names} == {kind}
    for name in names:
        in_halves = dequantize(stored.linear(name)).astype(np.float16)  # as checkpoints give them
        assert np.array_equal(in_halves, Checkpoint.open(file).linear(name)[0].numpy()), name
    check_logits(stored)


def test_a_head_that_cannot_be_kept_is_rounded_to_8_bits_and_named(tmp_path: Path) -> None:
    model, store = random_model("Llama"), Store(tmp_path / "store")
    file = write_gguf(tmp_path / "model.gguf", model, kind="Q4_0", kinds={"output.weight": "F16"})
    recipe = kept_by_default(file)
    assert recipe is not None
    info = quantize(file, store, recipe)
    assert info.summary.warning == "the output head, F16 in the source, is rounded to 8 bits"
    weight = model.lm_head.weight.detach().half().float().numpy()
    apart = np.abs(dequantize(store.open(info.name).linear("head")) - weight)
    largest = np.abs(weight.reshape(len(weight), -1, 32)).max(-1).repeat(32, axis=1)
    assert (apart <= largest * (0.5 / 127 + 2**-11)).all()


@pytest.mark.parametrize(
    ("case", "kind", "kinds", "found"),
    [
        ("llama", "Q8_0", {"blk.1.ffn_down.weight": "F16"}, "layers.1.down cannot be kept as they are (F16"),
        ("llama", "Q4_1", {"blk.0.attn_v.weight": "Q8_0"}, "layers.0.qkv cannot be kept as they are (Q4_1 and Q8_0"),
        ("llama", "Q5_0", {"blk.1.ffn_up.weight": "F16"}, "layers.1.gate_up cannot be kept as they are (F16 and Q5_0"),
        ("gemma4-experts", "Q4_0", {}, "layers.0.experts.0.down cannot be kept as they are (multiplied"),
    ],
)
def test_weights_of_other_types_are_rounded_as_before(
    tmp_path: Path, case: str, kind: str, kinds: dict[str, str], found: str
) -> None:
    family, changes = CASES[case]
    file = write_gguf(tmp_path / "model.gguf", random_model(family, **changes), kind=kind, kinds=kinds)
    with pytest.raises(QuantizationError) as error:
        keeping(file)
    assert found in str(error.value)
    assert kept_by_default(file) is None


@pytest.mark.parametrize(("kind", "unasked"), [("Q5_1", True), ("Q8_0", False)])
def test_a_file_of_8_bits_is_kept_only_where_that_is_asked_for(tmp_path: Path, kind: str, unasked: bool) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("Llama"), kind=kind)
    assert (kept_by_default(file) is not None) == unasked
    assert keeping(file) is not None
