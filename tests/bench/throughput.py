"""Many requests at once: tokens a second with 1 to 16 in flight, beside llama.cpp's batched decoding.

    .venv/bin/python -m tests.bench.throughput NAME=FOLDER:FILE.gguf ... --peer-python peers-venv/bin/python --out FILE

FOLDER is a stored model, or 3 or 4: random weights of 1.1 billion parameters (`tests.peers.shape`). Each program has a
process of its own and is idle in the other's turns. All requests of a turn come at once, are as long as each other, and
have prompts without a common beginning; answers are greedy. The peer is llama.cpp through its C interface: prompts one
after the other in batches of 512, then a token of every sequence in each batch, which is what its server does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

FLIGHTS = (1, 2, 4, 8, 16)
PROMPT, ANSWER = 512, 128
Turn = Callable[[int], tuple[float, float]]
"""Given how many are in flight, returns seconds until the last first token, and until the last token."""


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    found: list[list[int]] = np.random.default_rng(seed).integers(10, vocab - 10, (count, PROMPT)).tolist()
    return found


def ours(which: str, answer: int = ANSWER) -> Turn:
    """This project's engine on the CPU."""
    from assets import demo_path
    from models.store import StoredModel
    from runtime.backends.cpu.decoder import CpuDecoder
    from runtime.backends.decoder import DecoderOptions
    from runtime.engine.engine import Engine
    from runtime.text.sampling import SamplingOptions
    from runtime.text.tokenizer import Tokenizer
    from tests.peers.shape import RandomModel, llama_1b

    options = DecoderOptions(context=PROMPT + ANSWER, slots=max(FLIGHTS), max_rows=256)
    random = RandomModel(llama_1b(), int(which), residuals=False) if which.isdecimal() else None
    decoder = CpuDecoder(random or StoredModel.open_folder(Path(which), which), options)
    tokenizer = Tokenizer(demo_path() if which.isdecimal() else Path(which))
    engine = Engine(decoder, tokenizer, name=which, eos_token_ids=())
    seeds = iter(range(10_000))
    sampling = SamplingOptions(temperature=0, max_tokens=answer)

    def turn(count: int) -> tuple[float, float]:
        first: list[float] = []
        begin = time.perf_counter()
        for prompt in prompts(count, decoder.spec.vocab_size, next(seeds)):
            waits = [True]

            def receive(_item: object, waits: list[bool] = waits) -> None:
                if waits:
                    waits.clear()
                    first.append(time.perf_counter() - begin)

            engine.submit(prompt, sampling, receive)
        while engine.step():
            pass
        return max(first), time.perf_counter() - begin

    return turn


def llama(path: str, answer: int = ANSWER) -> Turn:
    """llama.cpp."""
    import llama_cpp as cpp

    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    vocab = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    parameters = cpp.llama_context_default_params()
    parameters.n_ctx = max(FLIGHTS) * (PROMPT + ANSWER)
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_seq_max, parameters.kv_unified = max(FLIGHTS), False
    parameters.n_threads = parameters.n_threads_batch = 2
    context = cpp.llama_init_from_model(model, parameters)
    memory = cpp.llama_get_memory(context)
    batch = cpp.llama_batch_init(512, 0, 1)
    seeds = iter(range(10_000))

    def run(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")

    def best(row: int) -> int:
        return int(np.ctypeslib.as_array(cpp.llama_get_logits_ith(context, row), shape=(vocab,)).argmax())

    def turn(count: int) -> tuple[float, float]:
        cpp.llama_memory_clear(memory, True)
        begin = time.perf_counter()
        tokens = []
        for sequence, prompt in enumerate(prompts(count, vocab, next(seeds))):
            run([(token, at, sequence, at == PROMPT - 1) for at, token in enumerate(prompt)])
            tokens.append(best(PROMPT - 1))
        first = time.perf_counter() - begin
        for at in range(PROMPT, PROMPT + answer - 1):
            run([(token, at, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [best(row) for row in range(count)]
        return first, time.perf_counter() - begin

    return turn


@contextmanager
def program(
    python: str, kind: str, which: str, *, answer: int = ANSWER, variant: str = ""
) -> Iterator[Callable[[int], tuple[float, float]]]:
    """A program in a process of its own.

    Args:
        python: Runs it.
        kind: `ours` or `llama`.
        which: Its model.
        answer: Tokens of an answer.
        variant: Instruction set of our kernels; empty: the best.
    """
    command = [python, "-m", "tests.bench.throughput", "--worker", kind, which, str(answer)]
    environment = {**os.environ, **({"LOWBIT_CHAT_CPU_VARIANT": variant} if variant else {})}
    words = subprocess.DEVNULL if kind == "llama" else None  # it tells all about every tensor
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def turn(count: int) -> tuple[float, float]:
            print(count, file=ask, flush=True)
            first, last = json.loads(answers.readline())
            return first, last

        yield turn
        ask.close()


def measured(turns: list[tuple[float, float]], count: int) -> dict[str, float]:
    """Medians of some turns."""
    last = statistics.median(turn[1] for turn in turns)
    writing = statistics.median(turn[1] - turn[0] for turn in turns)
    return {
        "seconds": last,
        "first_token_s": statistics.median(turn[0] for turn in turns),
        "tokens_per_s": count * ANSWER / last,
        "tokens_per_s_behind_the_last_first": count * (ANSWER - 1) / writing,
    }


def compare(name: str, mine: str, theirs: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model."""
    rows = []
    with program(sys.executable, "ours", mine) as own, program(asked.peer_python, "llama", theirs) as peer:
        own(1), peer(1)
        for count in asked.flights:
            turns: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
            for _ in range(asked.rounds):
                turns[0].append(own(count))
                turns[1].append(peer(count))
            ours, llama = (measured(each, count) for each in turns)
            ratio = ours["tokens_per_s"] / llama["tokens_per_s"]
            rows.append({"model": name, "in_flight": count, "ours": ours, "llama.cpp": llama, "ratio": ratio})
            print(f"{name} {count}: {ours['tokens_per_s']:.0f} beside {llama['tokens_per_s']:.0f}, {ratio:.2f}")
    return rows


def main() -> None:
    """Compare, or be one of the programs compared."""
    if sys.argv[1:2] == ["--worker"]:
        turn = {"ours": ours, "llama": llama}[sys.argv[2]](sys.argv[3], int(sys.argv[4]))
        for line in sys.stdin:
            print(json.dumps(turn(int(line))), flush=True)
        return
    from tests.bench.reporting.run import about_run, write_report  # the peer's Python has none of what it needs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER:FILE.gguf")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--flights", type=int, nargs="+", default=FLIGHTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        name, _, both = model.partition("=")
        rows += compare(name, *both.split(":", 1), asked)
    result = {
        **about_run("python -m tests.bench.throughput"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": importlib.metadata.version("lowbit-chat"),
        "prompt": PROMPT,
        "answer": ANSWER,
        "rows": rows,
    }
    write_report(asked.out, result)


if __name__ == "__main__":
    main()
