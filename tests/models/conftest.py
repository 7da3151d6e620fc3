"""Tiny random checkpoints, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?'\n"
TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!\n" * 8


def write_tokenizer(folder: Path, vocabulary: int = 96) -> None:
    """A tokenizer of single characters with the special tokens <unk>, <s> and </s>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *ALPHABET]
    words += [f"<{index}>" for index in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_checkpoint(
    folder: Path,
    *,
    family: str = "llama",
    hidden: int = 64,
    intermediate: int = 96,
    layers: int = 2,
    vocabulary: int = 96,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random model of the `llama` or `qwen2` (with biases) family with a tokenizer of single characters."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim = 4, 2, hidden // 4

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden),
        "model.norm.weight": 1 + 0.1 * weight(1, hidden)[0],
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows, width in (
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            tensors[f"{prefix}.{name}.weight"] = weight(rows, width)
            if family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{name}.bias"] = weight(1, rows)[0]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + 0.1 * weight(1, hidden)[0]
    if not tied:
        tensors["lm_head.weight"] = weight(vocabulary, hidden)
    write_shards(folder, tensors, shards)
    fields = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2]}))
    write_tokenizer(folder, vocabulary)
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {
            name: tensors[name] for name in names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        }
        save_file(held, folder / file)
        index |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def spoil(folder: Path, place: tuple[int, int]) -> Path:
    """Make one weight of a checkpoint's second block NaN."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][place] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two blocks; tests must not write to it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
