"""Makes the peer's models: random weights of the same shape as GGUF, quantized by llama.cpp itself.

    python -m tests.peers.make_gguf FOLDER            writes f16.gguf (2.2 GB), Q4_K_M.gguf and Q3_K_M.gguf
    python -m tests.peers.make_gguf FOLDER --source MODEL.gguf     the last two, of a real model
    python -m tests.peers.make_gguf FOLDER --shape gemma3          shape.gguf alone, of another shape

Another shape wants transformers and not llama.cpp, so this project's interpreter writes it. The peer's then finds
shape.gguf, and quantizes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.peers.shape import llama_1b

KINDS = ("Q4_K_M", "Q3_K_M")
F16 = 1
"""llama.cpp's LLAMA_FTYPE_MOSTLY_F16."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 4096,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
            "vocab_size": 4096,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
            "tie_word_embeddings": True,
            "vocab_size": 262144,
        },
    ),
}
"""Families of transformers with the sizes that decide their speed. The mixture has 6 of 24 blocks, Qwen3.5 4B 8 of 32,
both with a vocabulary that is smaller likewise; Gemma 3 1B is whole."""


def write_half_precision(path: Path) -> None:
    """Random weights in half precision, no vocabulary."""
    spec, rng = llama_1b(), np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(F16)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name, values.astype(np.float16))

    def vector(name: str) -> None:
        writer.add_tensor(name, np.ones(spec.hidden_size, np.float32))

    C, width = spec.hidden_size, spec.intermediate_size
    matrix("token_embd.weight", spec.vocab_size, C)
    for i in range(spec.num_layers):
        vector(f"blk.{i}.attn_norm.weight")
        vector(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", spec.q_width, C)
        matrix(f"blk.{i}.attn_k.weight", spec.kv_width, C)
        matrix(f"blk.{i}.attn_v.weight", spec.kv_width, C)
        matrix(f"blk.{i}.attn_output.weight", C, spec.q_width)
        matrix(f"blk.{i}.ffn_gate.weight", width, C)
        matrix(f"blk.{i}.ffn_up.weight", width, C)
        matrix(f"blk.{i}.ffn_down.weight", C, width)
    vector("output_norm.weight")
    matrix("output.weight", spec.vocab_size, C)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(path: Path, name: str) -> None:
    """Random weights of one of `SHAPES` in half precision, with a tokenizer of letters."""
    from tests.models.gguf.making import random_model, write_gguf

    family, sizes = SHAPES[name]
    write_gguf(path, random_model(family, **{**sizes, "max_position_embeddings": 2048}), kind="F16")


def main() -> None:
    """Write whatever of the files is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, help="a model to quantize instead of random weights")
    parser.add_argument("--shape", choices=SHAPES, help="write shape.gguf of this shape")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = folder / "shape.gguf"
    if arguments.shape:
        write_shape(shape, arguments.shape)
        return
    source: Path = arguments.source or (shape if shape.exists() else folder / "f16.gguf")
    if not source.exists():
        write_half_precision(source)
    from tests.bench.quality.llama_worker import quantize  # needs llama.cpp

    for name in KINDS:
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        quantize(source, target, name, {})


if __name__ == "__main__":
    main()
