"""llama.cpp's side of the comparison, in a separate interpreter that need not have this project's packages.

    python llama_worker.py REQUEST.json

The request names tensors (.npz, by GGUF's names), metadata, kinds of quantization and windows of token ids; the answer,
one JSON object on stdout, has for each kind the bytes by tensor type and the nats of every window, all of its scored
tokens and those that a chat decodes. Models are converted with the `gguf` package and quantized by llama.cpp itself;
nothing is kept.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

FULL = "F32"
FILE_TYPES = {
    "Q2_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "Q3_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "IQ3_M": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ3_M,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def write_gguf(path: Path, about: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """A Llama model in float32, its vocabulary left out: tokens are fed by number.

    Args:
        path: The file to make.
        about: Sizes, as in `tests.bench.quality.llama.describe`.
        tensors: float32, by GGUF's names; query and key rows already interleaved for its rotation.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(about["context"])
    writer.add_embedding_length(about["hidden"])
    writer.add_block_count(about["layers"])
    writer.add_feed_forward_length(about["intermediate"])
    writer.add_head_count(about["heads"])
    writer.add_head_count_kv(about["kv_heads"])
    writer.add_key_length(about["head_dim"])
    writer.add_value_length(about["head_dim"])
    writer.add_layer_norm_rms_eps(about["norm_eps"])
    writer.add_rope_dimension_count(about["head_dim"])
    writer.add_rope_freq_base(about["rope_theta"])
    writer.add_vocab_size(about["vocabulary"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(int(llama_cpp.LLAMA_FTYPE_ALL_F32))
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str, importance: dict[str, np.ndarray]) -> None:
    """Let llama.cpp quantize a file.

    Args:
        source: GGUF in float32.
        target: GGUF to make.
        kind: One of `FILE_TYPES`.
        importance: Mean squares of each tensor's inputs, float32 [K], by GGUF's names; empty for none.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], os.cpu_count() or 1
    if importance:
        kept = [np.ascontiguousarray(values, np.float32) for values in importance.values()]
        table = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()
        for row, name, values in zip(table, importance, kept, strict=False):
            row.name, row.size = name.encode(), values.size
            row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = table
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if status:
        raise SystemExit(f"llama.cpp could not quantize to {kind}: status {status}")


def sizes(path: Path) -> list[dict[str, Any]]:
    """Name, type, weights and bytes of every tensor of a file."""
    return [
        {
            "name": tensor.name,
            "type": tensor.tensor_type.name,
            "weights": int(tensor.n_elements),
            "bytes": int(tensor.n_bytes),
        }
        for tensor in gguf.GGUFReader(str(path)).tensors
    ]


class Model:
    """A loaded GGUF file that scores windows of tokens.

    Args:
        path: The file.
        window: Tokens of the longest window.
    """

    def __init__(self, path: Path, window: int) -> None:
        choices = llama_cpp.llama_model_default_params()
        choices.n_gpu_layers = 0
        choices.use_extra_bufts = False  # repacked weights crash on some virtual machines with AMX
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), choices)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {path.name}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = max(window, 32)
        options.n_threads = options.n_threads_batch = os.cpu_count() or 1
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise SystemExit(f"llama.cpp could not make a context for {path.name}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(window, 32), 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def nats(self, tokens: list[int], first: int) -> np.ndarray:
        """Negative log-likelihoods of tokens first .. end of a window, float64.

        Args:
            tokens: The window.
            first: The first token that is scored, at least 1.
        """
        count = len(tokens) - 1
        self._batch.n_tokens = count
        for i in range(count):
            self._batch.token[i], self._batch.pos[i] = tokens[i], i
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
            self._batch.logits[i] = i >= first - 1
        llama_cpp.llama_memory_clear(self._memory, True)
        if llama_cpp.llama_decode(self._context, self._batch):
            raise SystemExit("llama_decode failed")
        found = []
        for i in range(first - 1, count):
            row = llama_cpp.llama_get_logits_ith(self._context, i)
            logits = np.ctypeslib.as_array(row, (self._vocabulary,)).astype(np.float64)
            top = logits.max()
            found.append(top + np.log(np.exp(logits - top).sum()) - logits[tokens[i + 1]])
        return np.array(found)

    def close(self) -> None:
        """Give the memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def main() -> None:
    """Answer one request."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    with np.load(request["tensors"]) as file:
        tensors = {name: file[name] for name in file.files}
    with np.load(request["importance"]) as file:
        importance = {name: file[name] for name in file.files}
    windows = request["windows"]
    longest = max(len(part["tokens"]) for part in windows)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full.gguf"
        write_gguf(full, request["about"], tensors)
        for kind, weighted in request["kinds"]:
            path = full if kind == FULL else Path(folder) / "low.gguf"
            begin = time.perf_counter()
            if kind != FULL:
                quantize(full, path, kind, importance if weighted else {})
            seconds = round(time.perf_counter() - begin, 2)
            model = Model(path, longest)
            scored = [model.nats(part["tokens"], part["first"]) for part in windows]
            model.close()
            nats = [float(found.sum()) for found in scored]
            chat = [
                float(found[part["chat_first"] - part["first"] :].sum())
                for part, found in zip(windows, scored, strict=True)
            ]
            about = {"kind": kind, "weighted": weighted, "tensors": sizes(path), "seconds": seconds}
            rows.append({**about, "nats": nats, "chat_nats": chat})
    answer = {"version": importlib.metadata.version("llama-cpp-python"), "rows": rows}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
