"""llama.cpp in a process of its own, whose interpreter has llama-cpp-python, gguf and numpy.

    PYTHON -m tests.lab.llama [MODEL.gguf CONTEXT THREADS CACHE]

It reads a line of JSON for each job, a list of its name and arguments, and answers with a line of JSON:
`quantize`, `sizes`, `score` and `logits` name their files; `prefill`, `decode` and `behind` are timed on the model that
was named at the start. Make that interpreter once, with llama.cpp built for the processor at hand:

    python3 -m venv peers-venv
    peers-venv/bin/pip install gguf numpy llama-cpp-python --no-binary llama-cpp-python
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

PROMPT, PIECE = 256, 512
"""Tokens before decoding is timed, and rows of a batch."""
Row = tuple[int, int, int, bool]
"""Token, position, sequence, and whether its logits are wanted."""


@llama_cpp.llama_log_callback
def _say_nothing(_level: Any, _text: Any, _data: Any) -> None:
    """What llama.cpp logs through."""


def quantize(source: str, target: str, kind: str, importance: str = "") -> None:
    """Let llama.cpp quantize a file.

    Args:
        source: GGUF, full precision or low-bit.
        target: GGUF to make.
        kind: `Q4_K_M` and so on.
        importance: .npz of mean squares of each tensor's inputs, float32 [K], by GGUF's names; empty for none.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread, parameters.allow_requantize = os.cpu_count() or 1, True
    if importance:
        with np.load(importance) as file:
            kept = {name: np.ascontiguousarray(file[name], np.float32) for name in file.files}
        entries = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()
        for row, (name, values) in zip(entries, kept.items(), strict=False):
            row.name, row.size = name.encode(), values.size
            row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = entries
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters))
    if status:
        raise SystemExit(f"llama.cpp could not quantize to {kind}: status {status}")


def sizes(path: str) -> dict[str, float]:
    """Bytes that stay on the device, and bits of a weight of the matrices; a table that is the head counts as it."""
    tensors = gguf.GGUFReader(path).tensors
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    used = [tensor for tensor in tensors if tied or tensor.name != "token_embd.weight"]
    matrices = [tensor for tensor in used if "norm" not in tensor.name]
    bits = 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(t.n_elements) for t in matrices)
    return {"gpu_bytes": sum(int(t.n_bytes) for t in used), "bits_per_weight": round(bits, 4)}


def token_bytes(path: str) -> int:
    """Bytes of weights that a token reads: of experts its share."""
    reader = gguf.GGUFReader(path)
    counts = {key.rpartition(".")[2]: field.contents() for key, field in reader.fields.items() if "expert" in key}
    share = counts.get("expert_used_count", 1) / counts.get("expert_count", 1)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    used = [tensor for tensor in reader.tensors if tied or tensor.name != "token_embd.weight"]
    return round(sum(int(tensor.n_bytes) * (share if "_exps" in tensor.name else 1) for tensor in used))


class Context:
    """A loaded model with a cache.

    Args:
        path: GGUF.
        tokens: Positions of the cache.
        batch: Most rows at once.
        threads: Threads; 0: all.
        kind: `f16`, `q8_0` or `q4_0`: the type of keys and values.
        sequences: Sequences that share the positions.
    """

    def __init__(
        self, path: str, tokens: int, *, batch: int = PIECE, threads: int = 0, kind: str = "f16", sequences: int = 1
    ) -> None:
        choices = llama_cpp.llama_model_default_params()
        # Repacked weights crash on some virtual machines with AMX.
        choices.n_gpu_layers, choices.use_extra_bufts = 0, threads > 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), choices)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = -(-tokens // 256) * 256
        options.n_batch = options.n_ubatch = batch
        options.n_seq_max, options.kv_unified = sequences, sequences > 1
        options.n_threads = options.n_threads_batch = threads or os.cpu_count() or 1
        if kind != "f16":
            options.type_k = options.type_v = getattr(llama_cpp, f"GGML_TYPE_{kind.upper()}")
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise SystemExit(f"llama.cpp could not make a context of {tokens} tokens with a {kind} cache")
        self.memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._filled = 0

    def run(self, rows: Sequence[Row]) -> None:
        """Compute some rows."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(self._context)

    def logits(self, row: int) -> np.ndarray:
        """Logits of a row of the last batch, float32 [V]."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self._vocabulary,))

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(self.memory, True)

    def nats(self, tokens: Sequence[int], first: int) -> list[float]:
        """Negative log-likelihoods of tokens first .. end of a window."""
        self.clear()
        self.run([(token, i, 0, i >= first - 1) for i, token in enumerate(tokens[:-1])])
        found = []
        for i in range(first - 1, len(tokens) - 1):
            row = self.logits(i).astype(np.float64)
            top = row.max()
            found.append(float(top + np.log(np.exp(row - top).sum()) - row[tokens[i + 1]]))
        return found

    def prefill(self, count: int) -> list[float]:
        """Seconds of a prompt."""
        self.clear()
        begin = time.perf_counter()
        for at in range(0, count, PIECE):
            end = min(at + PIECE, count)
            self.run([(1 + i % 97, i, 0, i + 1 == count) for i in range(at, end)])
        return [time.perf_counter() - begin]

    def decode(self, count: int) -> list[float]:
        """Seconds of each of so many tokens behind a prompt."""
        self.prefill(PROMPT)
        return self._timed(PROMPT, count)

    def behind(self, tokens: int, count: int) -> list[float]:
        """Seconds of each of so many tokens behind a long cache, which is as before afterwards.

        It is filled as short sequences side by side, each at its own positions of the long one, which then gets them
        all: every cell is computed and stored, and no time goes into attention over all of them.
        """
        if self._filled != tokens:
            self.clear()
            pieces = range(-(-tokens // PIECE))
            for piece in pieces:
                places = range(piece * PIECE, min((piece + 1) * PIECE, tokens))
                self.run([(1 + at % 97, at, piece + 1, at + 1 == places.stop) for at in places])
            for piece in pieces:
                llama_cpp.llama_memory_seq_cp(self.memory, piece + 1, 0, -1, -1)
                llama_cpp.llama_memory_seq_rm(self.memory, piece + 1, -1, -1)
            if (last := llama_cpp.llama_memory_seq_pos_max(self.memory, 0)) != tokens - 1:
                raise SystemExit(f"llama.cpp's cache ends at position {last}, not {tokens - 1}")
            self._filled = tokens
        times = self._timed(tokens, count)
        llama_cpp.llama_memory_seq_rm(self.memory, 0, tokens, -1)
        return times

    def _timed(self, start: int, count: int) -> list[float]:
        times = []
        for at in range(start, start + count):
            begin = time.perf_counter()
            self.run([(1 + at % 97, at, 0, True)])
            times.append(time.perf_counter() - begin)
        return times


def score(path: str, windows: str) -> list[list[float]]:
    """Nats of each window of a JSON file, a list of tokens and the first that is scored."""
    parts = json.loads(Path(windows).read_text(encoding="utf-8"))
    longest = max(len(tokens) for tokens, _ in parts)
    context = Context(path, longest, batch=max(longest, 32))
    return [context.nats(tokens, first) for tokens, first in parts]


def logits(path: str, tokens: str, out: str) -> None:
    """Write the logits of every token of a .npy file, float32 [T, V]."""
    text = np.load(tokens).tolist()
    context = Context(path, len(text), batch=len(text))
    context.run([(token, at, 0, True) for at, token in enumerate(text)])
    np.save(out, np.array([context.logits(at) for at in range(len(text))]))


def main() -> None:
    """Answer jobs until stdin ends."""
    llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    about: dict[str, Any] = {"version": importlib.metadata.version("llama-cpp-python")}
    jobs: dict[str, Any] = {"quantize": quantize, "sizes": sizes, "score": score, "logits": logits}
    if len(sys.argv) > 1:
        path, tokens, threads, kind = sys.argv[1:]
        context = Context(path, int(tokens), threads=int(threads), kind=kind, sequences=-(-int(tokens) // PIECE) + 1)
        jobs |= {"prefill": context.prefill, "decode": context.decode, "behind": context.behind}
        about["bytes_per_token"] = token_bytes(path)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(jobs[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
