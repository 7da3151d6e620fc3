"""Side by side with llama.cpp, or with another version of this program: the same model, programs taking turns.

    python -m tests.lab.compare FOLDER --shape gemma3 --peer-python PYTHON --out tests/lab/results/peers-gemma3.json
    python -m tests.lab.compare FOLDER --smollm2 HF --stored 3=STORE/name --stored 4=STORE/name --peer-python PYTHON
    python -m tests.lab.compare --before TREE --starts 12 --rounds 3     without llama.cpp
    python -m tests.lab.compare FOLDER --peer-python PYTHON --spinners 0,1,2,4
    python -m tests.lab.compare FOLDER --shape lfm2-moe --peer-python PYTHON --bits 4 --processor

FOLDER keeps llama.cpp's files, which are made where they are missing: of SmolLM2, or of one of `SHAPES` with random
weights. Every start begins all programs anew, and each round runs every one of them once; medians count. The percentage
is the bytes of weights read for a token times tokens per second, over the read bandwidth measured in the same round.
TREE is a checkout of another version of lowbit-chat; one from before this module needs a copy of tests/lab. Where a
process's memory lies makes it faster or slower by up to a tenth for as long as it runs, so versions are told apart by
many starts: what counts is the median of what one took longer than the other after the same start. Spinners are
processes that do nothing but take processor time. With --processor all programs have one core, and the time that it
spent on each counts, which other processes hardly change. Interpreters with llama.cpp: see llama.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.lab.measure import Worker, closing_all, longer
from tests.lab.store import about_run, columns, parser, write

OURS, BEFORE, PEER = "lowbit-chat", "lowbit-chat before", "llama.cpp"
UNIFORM = " uniform"
KINDS = {"4": "Q4_K_M", "3": "Q3_K_M"}
K_CHUNKS = (0, 16, 64)
CONTEXT, PROMPT, THREADS = 1024, 256, 2
_ALTERNATING = [*["linear_attention"] * 3, "full_attention"] * 2
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1b": (
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000},
    ),
    "mixture": (
        "Qwen3Moe",
        {"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
         "norm_topk_prob": True, "vocab_size": 4096},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": _ALTERNATING, "vocab_size": 4096},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 4, "num_attention_heads": 32,
         "num_key_value_heads": 8, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1,
         "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_eps": 1e-5,
         "vocab_size": 4096},
    ),
    "glm4-flash": (
        "Glm4MoeLite",
        {"hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 3, "num_attention_heads": 20,
         "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
         "qk_rope_head_dim": 64, "v_head_dim": 256, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 1536, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "vocab_size": 4096},
    ),
    "granite4-h": (
        "GraniteMoeHybrid",
        {"hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 12,
         "num_key_value_heads": 4, "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 2],
         "num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "mamba_n_heads": 48,
         "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1, "vocab_size": 4096},
    ),
    "gemma3": (
        "Gemma3",
        {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
         "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
         "tie_word_embeddings": True, "vocab_size": 262144},
    ),
}  # fmt: skip
"""Families of transformers with the sizes that decide their speed. The mixture has 6 of 24 blocks, Qwen3.5 4B 8 of 32,
LFM2 8B-A1B 4 of 24, GLM-4.7-Flash 3 of 47, Granite 4 h-tiny 8 of 40, with a smaller vocabulary likewise; Gemma 3
1B is whole."""


def peer(python: str, *arguments: str) -> Worker:
    """llama.cpp's process."""
    return Worker(python, "-m", "tests.lab.llama", *arguments)


def job(worker: Worker, *words: object) -> Any:
    """The answer of llama.cpp's process."""
    return worker.ask(json.dumps(words))


def full_precision(folder: Path, shape: str, checkpoint: Path | None = None) -> Path:
    """A model as GGUF in half precision, written where it is missing: a checkpoint, or random weights of a shape."""
    from transformers import AutoModelForCausalLM

    from tests.models.gguf.making import random_model, write_gguf

    file = folder / "shape.gguf"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        family, sizes = SHAPES[shape]
        if checkpoint is None:
            model = random_model(family, **{**sizes, "max_position_embeddings": 2048})
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        write_gguf(file, model, kind="F16")
    return file


def prepared(folder: Path, source: Path, python: str, wanted: Sequence[str]) -> dict[str, Path]:
    """llama.cpp's low-bit files by bits, made where they are missing."""
    files = {bits: folder / f"{KINDS[bits]}.gguf" for bits in wanted}
    with closing_all({"llama.cpp": peer(python)}) as workers:
        for bits, file in files.items():
            if not file.is_file():
                job(workers["llama.cpp"], "quantize", str(source), str(file), KINDS[bits])
    return files


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that take all the processor time that they get."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 if running else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def programs(given: argparse.Namespace) -> dict[str, Callable[[], Worker]]:
    """How to start every program that is compared, by its name."""
    stored = dict(entry.split("=", 1) for entry in given.stored)
    source = full_precision(given.folder, given.shape, given.smollm2) if given.folder else None
    latent = given.smollm2 is None and any("lora" in size for size in SHAPES[given.shape][1])
    found: dict[str, Callable[[], Worker]] = {}
    for bits in given.bits.split(","):
        kinds = ("",) if latent else ("", UNIFORM)  # those of latent attention are uniform in any case
        models = {"": stored[bits]} if bits in stored else {own: f"{bits}{own}:{source or ''}" for own in kinds}
        for (codes, model), k_chunk in product(models.items(), K_CHUNKS):
            for name, tree in {OURS: None, **({BEFORE: given.before} if given.before else {})}.items():
                words = (sys.executable, "-m", "tests.lab.compare", "--worker", model, str(k_chunk))
                options = {} if tree is None else {"cwd": tree}
                called = f"{name} {bits}-bit{codes}{f', k_chunk {k_chunk}' if k_chunk else ''}"
                found[called] = partial(Worker, *words, **options)
    if source is not None and given.peer_python:
        for bits, file in prepared(given.folder, source, given.peer_python, given.bits.split(",")).items():
            words = (str(file), str(CONTEXT), str(1 if given.processor else THREADS), "f16")
            found[f"{PEER} {KINDS[bits]}"] = partial(peer, given.peer_python, *words)
    return found


class Seconds:
    """What one program took."""

    def __init__(self) -> None:
        self.decode: list[float] = []
        """Seconds of a decoded token: a median for each round."""
        self.starts: list[float] = []
        """The same for each start."""
        self.prefill: list[float] = []
        self.shares: list[float] = []
        """Shares of the read bandwidth."""
        self.about: dict[str, Any] = {}


def asked(name: str, worker: Worker, action: str, count: int) -> list[float]:
    """Seconds that a program says."""
    found: list[float] = job(worker, action, count) if name.startswith(PEER) else worker.ask(action, count)
    return found


def processor_seconds(name: str, worker: Worker, tokens: int) -> tuple[float, float]:
    """What a decoded token takes of a core, and a prompt of `PROMPT` tokens, which is read before decoding, too."""
    begin = worker.processor_s
    asked(name, worker, "prefill", PROMPT)
    between = worker.processor_s
    asked(name, worker, "decode", tokens)
    return (worker.processor_s - 2 * between + begin) / tokens, between - begin


def measure(
    compared: Mapping[str, Callable[[], Worker]], spinners: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """All programs beside some spinners; a row for each."""
    from tuner.bandwidth import read_bandwidth

    found = {name: Seconds() for name in compared}
    order = list(compared)
    for start in range(given.starts):
        random.Random(start).shuffle(order)
        with closing_all({name: compared[name]() for name in order}) as workers, spinning(spinners):
            for turn in range(given.rounds + 1):
                limit = 0.0 if given.processor else 1e9 * read_bandwidth(None, fresh=True).gb_s
                for name, worker in workers.items():
                    own = found[name]
                    if given.processor:
                        token, whole = processor_seconds(name, worker, given.tokens)
                        own.about = worker.about
                        own.decode += [token] * bool(turn)
                        own.prefill += [whole] * bool(turn)
                        continue
                    seconds = asked(name, worker, "decode", given.tokens)
                    prompt = [] if spinners else asked(name, worker, "prefill", given.prompt)
                    if turn:  # the first round warms up
                        # Beside others all of the time counts: a median would pass over tokens that were held up.
                        took = statistics.fmean(seconds) if spinners else statistics.median(seconds)
                        own.about = worker.about
                        own.decode.append(took)
                        own.prefill += prompt
                        own.shares.append(worker.about["bytes_per_token"] / took / limit)
            for own in found.values():
                own.starts.append(statistics.median(own.decode[-given.rounds :]))
    return [_row(name, found, spinners, given.prompt) for name in compared]


def _row(name: str, found: Mapping[str, Seconds], spinners: int, prompt: int) -> dict[str, Any]:
    """The medians of a program, and what it takes longer than another version and than without compensation."""
    own, before, plain = found[name], found.get(name.replace(OURS, BEFORE, 1)), found[name.partition(",")[0]]
    row = {
        "program": name,
        **own.about,
        "spinners": spinners,
        "decode_tokens_per_s": round(1 / statistics.median(own.decode), 1),
        "percent_of_read_bandwidth": None
        if spinners or not own.shares
        else round(100 * statistics.median(own.shares), 1),
        "prefill_tokens_per_s": None if spinners else round(prompt / statistics.median(own.prefill), 1),
    }
    if before is not None and before is not own:
        row["longer_than_before_percent"] = longer(own.starts, before.starts)
        row["prefill_longer_than_before_percent"] = None if spinners else longer(own.prefill, before.prefill)
    if plain is not own:
        row["longer_than_uncompensated_percent"] = longer(own.starts, plain.starts)
    return row


def worker(which: str, k_chunk: int) -> None:
    """This program's CPU backend: a stored model by its folder, or `BITS:` with the file whose shape it has, if any.

    Of a shape, weights are a trellis's, as they are by default, or of uniform codes (`BITS uniform:`).
    """
    from models.checkpoint import Checkpoint
    from models.store import StoredModel
    from runtime.backends.cpu.decoder import CpuDecoder
    from runtime.backends.decoder import DecoderOptions, Step
    from tests.lab.models import RandomModel, llama_1b

    bits, colon, like = which.partition(":")
    if colon:
        spec = replace(Checkpoint.open(Path(like)).spec, max_context=2 * CONTEXT) if like else llama_1b()
        trellis = spec.latent is None and not bits.endswith(UNIFORM)
        model: Any = RandomModel(spec, int(bits.split()[0]), residuals=k_chunk > 0, trellis=trellis)
    else:
        model = StoredModel.open_folder(Path(which), which)
    decoder = CpuDecoder(model, DecoderOptions(context=CONTEXT, k_chunk=k_chunk, max_rows=128))

    def prefill(count: int) -> list[float]:
        begin = time.perf_counter()
        with decoder.session():
            for at in range(0, count, 128):
                rows = np.arange(at, min(at + 128, count))
                decoder.forward(Step.of(rows, at, [len(rows) - 1], compensate=False))
        return [time.perf_counter() - begin]

    def decode(count: int) -> list[float]:
        prefill(PROMPT)
        times = []
        with decoder.session():
            for at in range(PROMPT, PROMPT + count):
                begin = time.perf_counter()
                decoder.forward(Step.of([at], at))
                times.append(time.perf_counter() - begin)
        return times

    print(json.dumps({"bytes_per_token": decoder.weight_bytes}), flush=True)
    for line in sys.stdin:
        action, count = line.split()
        print(json.dumps((prefill if action == "prefill" else decode)(int(count))), flush=True)


def main() -> None:
    """Compare, print and store; or be a program that is compared."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
        return
    options = parser(__doc__)
    options.add_argument("folder", type=Path, nargs="?", help="for llama.cpp's files; none: without it")
    options.add_argument("--shape", choices=SHAPES, default="1b", help="of random weights")
    options.add_argument("--smollm2", type=Path, help="Hugging Face folder of SmolLM2, instead of random weights")
    options.add_argument("--bits", default=",".join(KINDS), help="some of these, with commas between")
    options.add_argument("--stored", action="append", default=[], metavar="BITS=FOLDER")
    options.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    options.add_argument("--before", type=Path, metavar="TREE", help="checkout of another version")
    options.add_argument("--starts", type=int, default=1, help="times that all programs are started anew")
    options.add_argument("--rounds", type=int, default=9, help="rounds after each start")
    options.add_argument("--tokens", type=int, default=64, help="decoded tokens in a round")
    options.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    options.add_argument("--spinners", default="0", help="numbers of competing processes, with commas between")
    options.add_argument("--model", help="what the results call it")
    options.add_argument("--processor", action="store_true", help="one core each, and its time instead of a clock's")
    given = options.parse_args()
    if given.processor:
        given.prompt = PROMPT
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    compared = programs(given)
    rows = [row for count in given.spinners.split(",") for row in measure(compared, int(count), given)]
    print(columns(rows))
    model = given.model or ("SmolLM2-135M-Instruct" if given.smollm2 else f"{given.shape}, random weights")
    about = {
        "model": model,
        "processor": given.processor,
        "starts": given.starts,
        "rounds": given.rounds,
        "prompt_tokens": given.prompt,
    }
    write(given.out, {**about_run("python -m tests.lab.compare"), **about, "rows": rows})


if __name__ == "__main__":
    main()
