"""Frequency of loops in a model's answers, by repetition penalty, and the cost of the penalty on real text.

    python -m tests.bench.loops FOLDER --checkpoint HF_FOLDER --out FILE

FOLDER is a stored model. Twelve questions are answered three times each at the settings' temperature and filters, up to
700 tokens. An answer loops if fewer than 60 % of the runs of 8 tokens in its last 160 tokens are different ones. The
cost is that of the penalty on text which people wrote, read by the checkpoint in full precision: nats a token, and how
often the likeliest token is the one that comes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.settings import Settings
from assets import evaluation_text
from models.store import StoredModel
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions
from runtime.engine.engine import Engine
from runtime.engine.generation import Piece
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.bench.reporting.run import about_run

QUESTIONS = (
    "Write a short story about a keeper of a lighthouse, with a table of the ships at the end.",
    "Explain how a refrigerator works.",
    "Give me ten tips for learning to cook.",
    "What is the history of the bicycle?",
    "Write a letter to my landlord about a broken heater.",
    "Tell me about the planets of the solar system.",
    "How do I train for a marathon?",
    "Write a Python function that sorts a list, and explain it.",
    "Compare cats and dogs as pets.",
    "Describe a walk through an old city at night.",
    "What should I see in Rome in three days?",
    "Explain inflation to a child.",
)
PENALTIES = (1.0, 1.02, 1.05, 1.1)
TIMES, LONGEST = 3, 700
TAIL, RUN, DIFFERENT = 160, 8, 0.6
CODE = Path(__file__).parents[2] / "runtime" / "sampling.py"
WINDOW, WINDOWS = 512, 3


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end of an answer says the same again and again."""
    tail = tokens[-TAIL:]
    runs = [tuple(tail[at : at + RUN]) for at in range(len(tail) - RUN + 1)]
    return len(tail) == TAIL and len(set(runs)) < DIFFERENT * len(runs)


def answers(engine: Engine, prompts: Sequence[list[int]], penalty: float) -> list[list[int]]:
    """Tokens of every answer, all in flight together."""
    settings = Settings()
    found: list[list[int]] = []
    for seed in range(TIMES):
        for at, prompt in enumerate(prompts):
            tokens: list[int] = []
            found.append(tokens)
            options = SamplingOptions(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                repetition_penalty=penalty,
                max_tokens=LONGEST,
                seed=100 * seed + at,
            )
            engine.submit(prompt, options, _keeping(tokens))
    while engine.step():
        pass
    return found


def _keeping(tokens: list[int]) -> Callable[[object], None]:
    def keep(item: object) -> None:
        if isinstance(item, Piece) and item.token is not None:
            tokens.append(item.token)

    return keep


def talked(folder: Path, k_chunk: int) -> list[dict[str, Any]]:
    """Rows by penalty of one stored model."""
    model = StoredModel.open_folder(folder, folder.name)
    tokenizer = Tokenizer(folder)
    decoder = CpuDecoder(model, DecoderOptions(context=1024, slots=16, max_rows=256, k_chunk=k_chunk))
    engine = Engine(decoder, tokenizer, name=folder.name, eos_token_ids=model.spec.eos_token_ids)
    prompts = [engine.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    rows = []
    for penalty in PENALTIES:
        found = answers(engine, prompts, penalty)
        rows.append(
            {
                "k_chunk": k_chunk,
                "penalty": penalty,
                "answers": len(found),
                "loops": sum(map(loops, found)),
                "mean_tokens": float(np.mean([len(tokens) for tokens in found])),
            }
        )
        print(rows[-1], flush=True)
    return rows


def cost(checkpoint: Path) -> list[dict[str, Any]]:
    """Rows by text and penalty, in full precision."""
    import torch

    from models.checkpoint import Checkpoint
    from models.oracle import Oracle

    oracle, tokenizer, rows = Oracle(Checkpoint.open(checkpoint)), Tokenizer(checkpoint), []
    for name, text in (("prose", evaluation_text()), ("code", CODE.read_text(encoding="utf-8"))):
        tokens = np.array(tokenizer.encode(text)[: WINDOW * WINDOWS])
        found = {penalty: np.zeros(3) for penalty in PENALTIES}
        for start in range(0, tokens.size - WINDOW + 1, WINDOW):
            part = tokens[start : start + WINDOW]
            scored = list(range(WINDOW // 2 - 1, WINDOW - 1))
            logits = oracle.logits(torch.from_numpy(part[None]), rows=scored)[0].float().numpy()
            for penalty in PENALTIES:
                found[penalty] += np.array(scores(logits, part, scored, penalty))
        for penalty, (nats, hits, count) in found.items():
            rows.append({"text": name, "penalty": penalty, "nats": nats / count, "likeliest_comes": hits / count})
            print(rows[-1], flush=True)
    return rows


def scores(logits: Any, tokens: Any, scored: Sequence[int], penalty: float) -> tuple[float, int, int]:
    """Nats, hits of the likeliest token, and tokens; the second half of a window is the answer."""
    options = SamplingOptions(temperature=1.0, top_p=1.0, repetition_penalty=penalty)
    nats, hits = 0.0, 0
    for row, at in zip(logits, scored, strict=True):
        likely = Sampler(options, tokens[WINDOW // 2 : at + 1].tolist()).distribution(row)
        nats -= float(np.log(max(likely.probability(int(tokens[at + 1])), 1e-12)))
        hits += int(likely.tokens[likely.weights.argmax()] == tokens[at + 1])
    return nats, hits, len(scored)


def main() -> None:
    """Talk, read and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--k-chunk", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = [row for k_chunk in asked.k_chunk for row in talked(asked.folder, k_chunk)]
    about = {**about_run("python -m tests.bench.loops"), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    paid = cost(asked.checkpoint) if asked.checkpoint else []
    found = {**about, "model": asked.folder.name, "talked": rows, "cost": paid}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
