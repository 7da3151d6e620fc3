"""One compared program in a separate process: reads jobs from stdin, answers with times.

    python -m tests.peers.worker ours 4          python -m tests.peers.worker llama Q4_K_M.gguf
    python -m tests.peers.worker ours FOLDER 16  a stored model, with 16 of 1024 channels compensated
    python -m tests.peers.worker ours 4:FILE.gguf   random weights of the shape of that file

Each input line is `prefill N` (N tokens into an empty context) or `decode N` (N tokens, one by one, after 256); the
answer is one JSON line: a list of seconds, one for the prompt or one for each token. Between lines a program is idle.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

CONTEXT = 1024
PROMPT = 256


def ours(which: str, k_chunk: int) -> tuple[Callable[[int], list[float]], Callable[[int], list[float]], int]:
    """This project's CPU backend: random weights of so many bits, or a stored model by its folder."""
    from models.checkpoint import Checkpoint
    from models.store import StoredModel
    from runtime.backends.cpu.decoder import CpuDecoder
    from runtime.backends.decoder import DecoderOptions, Step
    from tests.peers.shape import RandomModel, llama_1b

    bits, _, like = which.partition(":")
    random = None
    if bits.isdecimal():
        spec = replace(Checkpoint.open(Path(like)).spec, max_context=2 * CONTEXT) if like else llama_1b()
        random = RandomModel(spec, int(bits), residuals=k_chunk > 0)
    model = random or StoredModel.open_folder(Path(which), which)
    decoder = CpuDecoder(model, DecoderOptions(context=CONTEXT, k_chunk=k_chunk, max_rows=128))

    def run(start: int, count: int, *, compensate: bool) -> None:
        numbers = np.arange(start, start + count, dtype=np.int32)
        last = np.array([count - 1], np.int32)
        decoder.forward(
            Step(tokens=numbers, slots=numbers * 0, positions=numbers, logit_rows=last, compensate=compensate)
        )

    def prefill(count: int) -> list[float]:
        begin = time.perf_counter()
        with decoder.session():
            for start in range(0, count, 128):
                run(start, min(128, count - start), compensate=False)
        return [time.perf_counter() - begin]

    def decode(count: int) -> list[float]:
        times = []
        prefill(PROMPT)
        with decoder.session():
            for i in range(count):
                begin = time.perf_counter()
                run(PROMPT + i, 1, compensate=True)
                times.append(time.perf_counter() - begin)
        return times

    return prefill, decode, decoder.weight_bytes


def llama(path: str) -> tuple[Callable[[int], list[float]], Callable[[int], list[float]], int]:
    """llama.cpp through its C interface, as llama-bench drives it."""
    import gguf
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = CONTEXT, 512, 512
    parameters.n_threads = parameters.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, parameters)
    memory = llama_cpp.llama_get_memory(context)
    reader = gguf.GGUFReader(path)
    tensors = reader.tensors
    numbers = {key.rpartition(".")[2]: field.contents() for key, field in reader.fields.items() if "expert" in key}
    share = numbers.get("expert_used_count", 1) / numbers.get("expert_count", 1)
    # A table that is the output head too is read for every token.
    tied = all(t.name != "output.weight" for t in tensors)
    weights = [t for t in tensors if tied or t.name != "token_embd.weight"]
    read = round(sum(int(t.n_bytes) * (share if "_exps" in t.name else 1) for t in weights))

    def run(count: int) -> None:
        tokens = (llama_cpp.llama_token * count)(*range(1, count + 1))
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)):
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    def prefill(count: int) -> list[float]:
        llama_cpp.llama_memory_clear(memory, True)
        begin = time.perf_counter()
        run(count)
        return [time.perf_counter() - begin]

    def decode(count: int) -> list[float]:
        prefill(PROMPT)
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            run(1)
            times.append(time.perf_counter() - begin)
        return times

    return prefill, decode, read


def main() -> None:
    """Serve one program until stdin ends."""
    kind, argument, *rest = sys.argv[1:]
    mine = kind == "ours"
    prefill, decode, read = ours(argument, int(rest[0]) if rest else 0) if mine else llama(argument)
    version = importlib.metadata.version("lowbit-chat" if mine else "llama-cpp-python")
    print(json.dumps({"bytes_per_token": read, "version": version}), flush=True)
    for line in sys.stdin:
        action, count = line.split()
        print(json.dumps({"prefill": prefill, "decode": decode}[action](int(count))), flush=True)


if __name__ == "__main__":
    main()
