"""Copied drafts on tasks that copy and tasks that do not: speed with and without, alternating.

python -m tests.bench.speculation --only copied --stored NAME=FOLDER [--one-thread]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.engine.speculation.copying import StepTimes
from runtime.engine.speculation.gamma import FixedGamma
from runtime.engine.speculation.measure import Continuation, continued
from runtime.load.open import open_decoder
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.bench.reporting.markdown import table

_STORY = """The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs, lit the lamp \
and wrote the weather into his book. In winter no boat came for weeks, and he spoke to nobody but his dog. One morning \
in March a small red sail appeared in the fog. The keeper rang the bell until his arms hurt. A young woman stepped \
ashore, wet and smiling, and asked for tea. She stayed for three days, repaired the broken radio and painted the door \
green. When she left, she gave him a letter for the harbour master."""
_MISTAKES = {"climbed": "climbd", "weather into": "wether in to", "appeared": "apeared", "broken": "brocken"}
_CODE = """def total_price(items, tax_rate):
    total = 0.0
    for item in items:
        price = item["price"] * item["count"]
        if item["count"] >= 10:
            price = price * 0.9
        total = total + price
    total = total * (1 + tax_rate)
    return round(total, 2)


def print_receipt(items, tax_rate):
    for item in items:
        print(item["name"], item["count"], item["price"])
    print("Total:", total_price(items, tax_rate))
"""


def _misspelled(text: str) -> str:
    """A text with some mistakes."""
    for right, wrong in _MISTAKES.items():
        text = text.replace(right, wrong)
    return text


COPYING = {
    "correct a text": f"Correct the spelling of this text. Repeat the whole text and change nothing else.\n\n"
    f"{_misspelled(_STORY)}",
    "change one name": f"Rename the variable tax_rate to vat in this code. Write the whole code again.\n\n"
    f"```python\n{_CODE}```",
    "quote a document": f"Quote this document word for word.\n\n{_STORY}",
    "quote a part": f"Here is a document:\n\n{_STORY}\n\nCopy the sentences about the young woman as they are written.",
    "add docstrings": f"Add a docstring to each function, and write the whole code again.\n\n```python\n{_CODE}```",
}
FREE = {
    "explain": "Explain how a bicycle stays upright.",
    "tell a story": "Write a short story about a lighthouse keeper.",
    "answer": "What is photosynthesis, and why does it matter?",
    "write an email": "Write an email to my landlord about a broken heater.",
    "list": "Name ten cities in Europe and say one thing about each.",
    "instruct": "How do I bake bread?",
}
WAYS = {
    "greedy": SamplingOptions(temperature=0),
    "drawn": SamplingOptions(temperature=0.7, top_p=0.95, top_k=40, repetition_penalty=1.05, seed=1),
}
"""How tokens are drawn; the second is as the settings have it, with a seed."""
_ANSWER, _CONTEXT, _TARGETS = 256, 768, {"base": 0, "compensated": 64}
"""Tokens of an answer at most, positions of the cache, and k_chunk of the targets."""
Rows = list[dict[str, Any]]


def copied(name: str, model: StoredModel, rounds: int, *, one_thread: bool) -> Iterator[dict[str, Any]]:
    """Each task with copied drafts and without, in turns in one process, with the 4-bit cache on the CPU.

    Args:
        name: Of the model.
        model: The model.
        rounds: How often each way is timed.
        one_thread: Whether one thread decodes, timed by the processor's seconds: for a machine that others use.
    """
    clock, threads = (time.process_time, 1) if one_thread else (time.perf_counter, 0)
    tokenizer = Tokenizer(model.tokenizer_path)
    decoder = open_decoder(model, DecoderOptions(kv="int4", context=_CONTEXT, threads=threads), "cpu")[0]
    ends = {*model.spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    for target, k_chunk in _TARGETS.items():
        decoder.set_k_chunk(k_chunk)
        times = StepTimes()
        for kind, tasks in (("copies", COPYING), ("free", FREE)):
            for task, text in tasks.items():
                prompt = tokenizer.chat([{"role": "user", "content": text}])
                for way, sampling in WAYS.items():
                    found: dict[bool, list[Continuation]] = {False: [], True: []}
                    for turn in range(2 * rounds):
                        drafts = turn % 4 in (1, 2)  # neither always comes second
                        own = times if drafts else None
                        found[drafts].append(
                            continued(
                                decoder, prompt, _ANSWER, sampling, FixedGamma(0), times=own, ends=ends, clock=clock
                            )
                        )
                    yield {
                        "model": name,
                        "threads": threads,
                        "target": target,
                        "kind": kind,
                        "task": task,
                        "way": way,
                        **_summary(found),
                    }
    decoder.close()


def _summary(found: dict[bool, list[Continuation]]) -> dict[str, Any]:
    """Medians of both ways, and what was drafted."""
    pairs = list(zip(found[False], found[True], strict=True))
    did = found[True][-1]
    return {
        "tokens": len(did.tokens),
        "plain_tokens_per_s": statistics.median(each.tokens_per_s for each in found[False]),
        "tokens_per_s": statistics.median(each.tokens_per_s for each in found[True]),
        "speedup": statistics.median(drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in pairs),
        "acceptance_rate": did.speculation.acceptance_rate,
        "tokens_per_verify": did.speculation.tokens_per_verify,
        "rounds": did.speculation.rounds,
        "same_tokens": all(list(plain.tokens) == list(drafted.tokens) for plain, drafted in pairs),
    }


def copied_table(rows: Rows) -> str:
    """Speed of each task with copied drafts and without."""
    head = ("model", "target", "task", "tokens drawn", "plain tok/s", "with copies", "speedup", "accepted")
    return table(
        (*head, "tokens a verify"),
        (
            (
                row["model"],
                row["target"],
                f"{row['kind']}: {row['task']}",
                f"{row['tokens']}, {row['way']}",
                f"{row['plain_tokens_per_s']:.0f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['speedup']:.2f}",
                f"{100 * row['acceptance_rate']:.0f} %",
                f"{row['tokens_per_verify']:.1f}" if row["rounds"] else "–",
            )
            for row in rows
        ),
    )
