"""Makes the peer's models: random weights of the same shape as GGUF, quantized by llama.cpp itself.

python -m tests.peers.make_gguf FOLDER            writes f16.gguf (2.2 GB), Q4_K_M.gguf and Q3_K_M.gguf
python -m tests.peers.make_gguf FOLDER --source MODEL.gguf     the last two, of a real model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from tests.bench.quality.llama_worker import quantize
from tests.peers.shape import llama_1b

KINDS = ("Q4_K_M", "Q3_K_M")


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
    writer.add_file_type(int(llama_cpp.LLAMA_FTYPE_MOSTLY_F16))

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


def main() -> None:
    """Write whatever of the three files is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, help="a model to quantize instead of random weights")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    source: Path = arguments.source or folder / "f16.gguf"
    if not source.exists():
        write_half_precision(source)
    for name in KINDS:
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        quantize(source, target, name, {})


if __name__ == "__main__":
    main()
