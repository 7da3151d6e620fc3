"""llama.cpp's side of the timing, in a separate interpreter that need not have this project's packages.

    python -m tests.bench.caches.llama_worker MODEL.gguf THREADS TOKENS STEPS f16 q4_0

Makes MODEL.gguf (random weights, Q4_0) where it is missing. For each type of cache a context with TOKENS tokens is
loaded; as `tests.bench.caches.worker` it then answers lines `TYPE N` with the seconds of N decoded tokens.

The cache is filled as short sequences side by side, each at its own positions of the long one, which then gets them
all: every cell is computed and stored, and no time goes into attention over all of them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tests.bench.quality.llama_worker import quantize, write_gguf

_PIECE = 512
_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}


def make(path: Path, about: dict[str, Any]) -> None:
    """Random weights of a shape as GGUF, quantized to 4 bits by llama.cpp itself.

    Args:
        path: The file to make.
        about: Sizes, as `tests.bench.quality.llama_worker.write_gguf` takes them.
    """
    rng = np.random.default_rng(0)
    hidden, width, kv = about["hidden"], about["intermediate"], about["kv_heads"] * about["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))

    ones = np.ones(hidden, np.float32)
    tensors = {
        "token_embd.weight": matrix(about["vocabulary"], hidden),
        "output_norm.weight": ones,
        "output.weight": matrix(about["vocabulary"], hidden),
    }
    for i in range(about["layers"]):
        shapes = {
            "attn_q": (about["heads"] * about["head_dim"], hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, about["heads"] * about["head_dim"]),
            "ffn_gate": (width, hidden),
            "ffn_up": (width, hidden),
            "ffn_down": (hidden, width),
        }
        tensors |= {f"blk.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{i}.{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
    full, partial = path.with_suffix(".f32"), path.with_suffix(".partial")
    write_gguf(full, about, tensors)
    quantize(full, partial, "Q4_0", {})
    full.unlink()
    partial.rename(path)


class Context:
    """A context of one type of cache, filled.

    Args:
        model: The loaded model.
        kind: Type of keys and values.
        threads: Threads.
        tokens: Tokens in the cache.
        steps: Room for more.
    """

    def __init__(self, model: Any, kind: str, threads: int, tokens: int, steps: int) -> None:
        options = llama_cpp.llama_context_default_params()
        pieces = -(-tokens // _PIECE)
        options.n_ctx = -(-(tokens + steps) // 256) * 256
        options.n_batch = options.n_ubatch = _PIECE
        options.n_seq_max, options.kv_unified = pieces + 1, True
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = _TYPES[kind]
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise SystemExit(f"llama.cpp could not make a context with a {kind} cache")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_PIECE, 0, 1)
        self._tokens = tokens
        for piece in range(pieces):
            start = piece * _PIECE
            self._run(range(start, min(start + _PIECE, tokens)), piece + 1)
        for piece in range(pieces):
            llama_cpp.llama_memory_seq_cp(self._memory, piece + 1, 0, -1, -1)
            llama_cpp.llama_memory_seq_rm(self._memory, piece + 1, -1, -1)
        last = llama_cpp.llama_memory_seq_pos_max(self._memory, 0)
        if last != tokens - 1:
            raise SystemExit(f"llama.cpp's cache ends at position {last}, not {tokens - 1}")

    def _run(self, positions: range, sequence: int) -> None:
        batch = self._batch
        batch.n_tokens = len(positions)
        for i, position in enumerate(positions):
            batch.token[i], batch.pos[i], batch.logits[i] = 1 + position % 97, position, i + 1 == len(positions)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(self._context)

    def decode(self, count: int) -> list[float]:
        """Seconds of each of so many tokens, which are dropped afterwards."""
        times = []
        for i in range(count):
            begin = time.perf_counter()
            self._run(range(self._tokens + i, self._tokens + i + 1), 0)
            times.append(time.perf_counter() - begin)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, self._tokens, -1)
        return times


def main() -> None:
    """Serve until stdin ends."""
    from tests.bench.caches.shape_sizes import described

    path, threads, tokens, steps, *kinds = sys.argv[1:]
    silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    if not Path(path).is_file():
        make(Path(path), described())
    choices = llama_cpp.llama_model_default_params()
    choices.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), choices)
    if not model:
        raise SystemExit(f"llama.cpp could not load {path}")
    contexts = {kind: Context(model, kind, int(threads), int(tokens), int(steps)) for kind in kinds}
    print(json.dumps({"version": importlib.metadata.version("llama-cpp-python")}), flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        print(json.dumps(contexts[kind].decode(int(count))), flush=True)


if __name__ == "__main__":
    main()
