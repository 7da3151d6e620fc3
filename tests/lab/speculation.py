"""What speculation gains: acceptance, equality with the target alone, memory, costs of steps, speed, copied drafts.

    python -m tests.lab.speculation --stored smollm2-3=FOLDER smollm2-4=FOLDER
    python -m tests.lab.speculation --stored NAME=FOLDER --only acceptance equal

Acceptance does not depend on the machine; costs and speed do, and are measured in turns. The shape's weights are
random: what its steps cost does not depend on them, what is accepted would.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assets import evaluation_text
from models.checkpoint import Checkpoint
from models.exact import ExactSource
from models.oracle import Oracle
from models.packed import Weights
from models.store import StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.engine.copying import StepTimes
from runtime.engine.costs import measure_costs, sensitivities
from runtime.engine.gamma import AdaptiveGamma, Costs, FixedGamma
from runtime.engine.measure import Continuation, continued
from runtime.engine.mtp import MtpDrafts
from runtime.kv.kinds import KVKind
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.measure.speed import fill
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.lab.caches import peak
from tests.lab.models import DATA, Foreseeing, RandomModel, llama, llama_1b, opened
from tests.lab.store import about_run, columns, parser, read, write

TARGETS = {"residual": 1024, "compensated": 64, "base": 0}
"""k_chunk of each target."""
GAMMAS, TEMPERATURES = (1, 3, 6), (0.0, 1.0)
"""What acceptance is measured by: tokens of a round, and how they are drawn."""
QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is photosynthesis, and why does it matter?",
)
TEXTS, ANSWER = {"1k text": 1000, "4k text": 4000, "8k text": 8000}, 128
"""Long prompts and their tokens, and those of an answer."""
CONTEXTS, SHAPE_CONTEXTS = (1024, 8000), (1024, 8192, 32768)
MEMORY_WAYS: tuple[tuple[KVKind, int, bool], ...] = (
    *(("fp16", 0, False), ("int4", 0, False), ("hierarchical", 0, True)),
    *(("fp16", 1024, False), ("hierarchical", 1024, True)),
)
"""Kind of cache, k_chunk, and whether the model drafts."""
_ROOM, _TURNS = 32, 3
"""Positions behind a context, and how often all ways are timed there in turns; the fastest of each counts."""
_STORY = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs, lit the lamp and "
    "wrote the weather into his book. In winter no boat came for weeks, and he spoke to nobody but his dog. One "
    "morning in March a small red sail appeared in the fog. The keeper rang the bell until his arms hurt. A young "
    "woman stepped ashore, wet and smiling, and asked for tea. She stayed for three days, repaired the broken "
    "radio and painted the door green."
)
_CODE = """def total_price(items, tax_rate):
    total = 0.0
    for item in items:
        price = item["price"] * item["count"]
        if item["count"] >= 10:
            price = price * 0.9
        total = total + price
    return round(total * (1 + tax_rate), 2)
"""
TASKS = {
    "copies": (
        f"Correct the spelling of this text. Repeat the whole text.\n\n{_STORY.replace('climbed', 'climbd')}",
        f"Rename the variable tax_rate to vat in this code. Write the whole code again.\n\n```python\n{_CODE}```",
        f"Quote this document word for word.\n\n{_STORY}",
        f"Here is a document:\n\n{_STORY}\n\nCopy the sentences about the young woman as they are written.",
    ),
    "free": (*QUESTIONS, "Write an email to my landlord about a broken heater.", "How do I bake bread?"),
}
"""Answers that repeat their source, and others."""
WAYS = {
    "greedy": SamplingOptions(temperature=0),
    "drawn": SamplingOptions(temperature=0.7, top_p=0.95, top_k=40, repetition_penalty=1.05, seed=1),
}
"""The second is as the settings have it, with a seed."""
Rows = Iterator[dict[str, Any]]


def prompts_of(model: StoredModel) -> dict[str, list[list[int]]]:
    """Questions as a chat asks them, and long texts."""
    tokenizer = Tokenizer(model.tokenizer_path)
    chats = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    text = tokenizer.encode((DATA / "text" / "wikitext2-test.txt").read_text(encoding="utf-8")[:60000])
    return {"chat": chats, **{name: [text[:count]] for name, count in TEXTS.items()}}


def decoder_of(model: Weights, context: int, kv: KVKind = "hierarchical") -> Decoder:
    """A model on the CPU, its prompts not compensated."""
    return open_decoder(model, DecoderOptions(kv=kv, context=context, max_rows=128), "cpu")[0]


def _accepted(decoder: Decoder, prompts: Sequence[Sequence[int]], gamma: int, temperature: float) -> list[float]:
    """Drafted and accepted tokens, and rounds, of answers to some prompts."""
    total = [0.0, 0.0, 0.0]
    for seed, prompt in enumerate(prompts):
        sampling = SamplingOptions(temperature=temperature, top_p=0.95, seed=seed)
        did = continued(decoder, prompt, ANSWER, sampling, FixedGamma(gamma)).speculation
        total = [
            a + b for a, b in zip(total, (did.drafted, did.acceptance_rate * did.drafted, did.rounds), strict=True)
        ]
    return total


def _rates(total: Sequence[float]) -> dict[str, float]:
    drafted, accepted, rounds = total
    return {"acceptance_rate": accepted / drafted, "tokens_per_verify": (accepted + rounds) / rounds}


def acceptance(name: str, model: StoredModel) -> Rows:
    """What is accepted, by target, gamma, temperature and prompt (QuantSpec, Table 6)."""
    decoder, prompts = decoder_of(model, max(TEXTS.values()) + ANSWER), prompts_of(model)
    for where, target, gamma, temperature in itertools.product(prompts, TARGETS, GAMMAS, TEMPERATURES):
        if TEXTS.get(where, 0) > 1000 and (gamma, temperature) != (3, 0.0):
            continue  # minutes each
        decoder.set_k_chunk(TARGETS[target])
        about = {"target": target, "gamma": gamma, "temperature": temperature}
        total = _accepted(decoder, prompts[where], gamma, temperature)
        yield {"model": name, "prompt": where, **about, **_rates(total)}
    decoder.close()


def sensitive(name: str, model: StoredModel) -> Rows:
    """What is accepted where drafts read some layers' cache as the target does (QuantSpec, Algorithm 1: L_S)."""
    decoder, prompts = decoder_of(model, TEXTS["1k text"] + ANSWER), prompts_of(model)
    moved = sensitivities(decoder, Tokenizer(model.tokenizer_path).encode(evaluation_text()))
    order = sorted(range(len(moved)), key=lambda layer: -moved[layer])
    for target, count in itertools.product(("residual", "base"), (0, 1, 2, 4, 8, len(moved))):
        decoder.set_k_chunk(TARGETS[target])
        decoder.set_sensitive_layers(order[:count])
        totals = [_accepted(decoder, prompts["1k text"], 3, temperature) for temperature in TEMPERATURES]
        rates = _rates([sum(each) for each in zip(*totals, strict=True)])
        about = {"target": target, "prompt": "1k text", "sensitive_layers": sorted(order[:count]), "layers": len(moved)}
        yield {"model": name, **about, "count": count, **rates}
    decoder.close()


def equal(name: str, model: StoredModel) -> Rows:
    """Greedy tokens of the target alone and with drafts; and nats of drawn texts, each token scored by a plain step."""
    decoder, prompt = decoder_of(model, 2300), prompts_of(model)["chat"][1]
    tokens = Tokenizer(model.tokenizer_path).encode(evaluation_text())
    for target, gamma in itertools.product(("residual", "compensated"), (1, 3, 6, 11)):
        decoder.set_k_chunk(TARGETS[target])
        decoder.set_draft_k_chunk(0)
        alone = continued(decoder, prompt, 2000, WAYS["greedy"], FixedGamma(0)).tokens
        drafted = continued(decoder, prompt, 2000, WAYS["greedy"], FixedGamma(gamma)).tokens
        parted = next((i for i, pair in enumerate(zip(alone, drafted, strict=True)) if pair[0] != pair[1]), None)
        yield {"model": name, "target": target, "gamma": gamma, "tokens": 2000, "parted_at": parted}
    decoder.set_k_chunk(TARGETS["residual"])
    nats: dict[int, list[float]] = {0: [], 3: []}
    for number, gamma in itertools.product(range(40), nats):
        start = number * (len(tokens) - 128) // 40
        sampling = SamplingOptions(temperature=1, seed=2 * number + (gamma > 0))
        text = [*tokens[start : start + 128]]
        text += continued(decoder, text, 128, sampling, FixedGamma(gamma)).tokens
        result = perplexity(decoder, text, len(text), len(text), as_chat=True)
        nats[gamma].append(result.nll_sum / result.tokens)
    for gamma, own in nats.items():
        error = statistics.stdev(own) / len(own) ** 0.5
        yield {"model": name, "target": "residual", "gamma": gamma, "nats": statistics.mean(own), "error": error}
    decoder.close()


def memory(name: str, about: Mapping[str, Any], contexts: Sequence[int]) -> Rows:
    """Peak memory by context, of plain decoding and of drafts (QuantSpec, Tables 4 and 5)."""
    for context, (kind, k_chunk, drafts) in itertools.product(contexts, MEMORY_WAYS):
        asked = {**about, "kind": kind, "context": context, "k_chunk": k_chunk, "drafts": drafts}
        yield {"model": name, **peak(asked)}


def costs(name: str, model: Weights, contexts: Sequence[int], targets: Sequence[str]) -> Rows:
    """What steps cost by context and target; of the residual target also what the draft of each half would.

    `both` drafts by low-bit weights and the upper plane, `weights` by low-bit weights from a cache of 8 bits without
    planes, `kv` by the target's weights and the upper plane (QuantSpec, Fig. 5).
    """
    kinds: dict[KVKind, list[tuple[str, str]]] = {
        "hierarchical": [*(("both", target) for target in targets), ("kv", "residual")],
        "int8": [("weights", "residual")],
    }
    for kv, ways in kinds.items():
        decoder = decoder_of(model, max(contexts) + _ROOM, kv)
        for context in contexts:
            fill(decoder, context)
            found: dict[tuple[str, str], list[Costs]] = {way: [] for way in ways}
            for _, (way, target) in itertools.product(range(_TURNS), ways):
                decoder.set_k_chunk(TARGETS[target])
                decoder.set_draft_k_chunk(TARGETS[target] if way == "kv" else 0)
                found[way, target].append(measure_costs(decoder, position=context))
            for (way, target), own in found.items():
                yield {
                    "model": name,
                    "context": context,
                    "target": target,
                    "draft": way,
                    "plain_ms": 1e3 * min(each.plain for each in own),
                    "draft_ms": 1e3 * min(each.draft for each in own),
                    "verify_ms": [1e3 * min(each) for each in zip(*(cost.verify for cost in own), strict=True)],
                }
        decoder.close()


def speed(name: str, model: StoredModel, rounds: int) -> Rows:
    """Tokens a second with adapted speculation and without, in turns, of the same prompts."""
    decoder, prompts = decoder_of(model, TEXTS["1k text"] + ANSWER), prompts_of(model)["chat"]
    for target, temperature in itertools.product(TARGETS, (0.0, 0.7)):
        decoder.set_k_chunk(TARGETS[target])
        position = max(map(len, prompts)) + ANSWER // 2  # where steps are used: in the middle of an answer
        fill(decoder, position)
        gamma = AdaptiveGamma(measure_costs(decoder, position=position))
        pairs = []
        for turn, prompt in itertools.product(range(rounds), prompts):
            sampling = SamplingOptions(temperature=temperature, top_p=0.95, seed=turn)
            alone = continued(decoder, prompt, ANSWER, sampling, FixedGamma(0))
            pairs.append((alone, continued(decoder, prompt, ANSWER, sampling, gamma)))
        rates = statistics.mean(drafted.speculation.acceptance_rate for _, drafted in pairs)
        about = {"model": name, "target": target, "temperature": temperature, "gamma": gamma.current}
        yield {**about, **_speeds(pairs), "acceptance_rate": rates}
    decoder.close()


def copied(name: str, model: StoredModel, rounds: int, *, one_thread: bool) -> Rows:
    """Each task with copied drafts and without, in turns in one process, with the 4-bit cache on the CPU."""
    clock, threads = (time.process_time, 1) if one_thread else (time.perf_counter, 0)
    tokenizer = Tokenizer(model.tokenizer_path)
    decoder = open_decoder(model, DecoderOptions(kv="int4", context=768, threads=threads), "cpu")[0]
    ends = {*model.spec.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    for target in ("base", "compensated"):
        decoder.set_k_chunk(TARGETS[target])
        times = StepTimes()
        for kind, way in itertools.product(TASKS, WAYS):
            for text in TASKS[kind]:
                prompt, found = tokenizer.chat([{"role": "user", "content": text}]), dict[bool, list[Continuation]]()
                for turn in range(2 * rounds):
                    drafts = turn % 4 in (1, 2)  # neither always comes second
                    own = {"times": times if drafts else None, "ends": ends, "clock": clock}
                    answer = continued(decoder, prompt, 256, WAYS[way], FixedGamma(0), **own)
                    found.setdefault(drafts, []).append(answer)
                pairs = list(zip(found[False], found[True], strict=True))
                about = {"model": name, "target": target, "kind": kind, "way": way, "task": text[:30]}
                yield {**about, "tokens": len(pairs[-1][1].tokens), **_speeds(pairs)}
    decoder.close()


def _speeds(pairs: Sequence[tuple[Continuation, Continuation]]) -> dict[str, Any]:
    """Medians of answers without drafts and with them, of neighbours in time."""
    return {
        "plain_tokens_per_s": statistics.median(plain.tokens_per_s for plain, _ in pairs),
        "tokens_per_s": statistics.median(drafted.tokens_per_s for _, drafted in pairs),
        "speedup": statistics.median(drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in pairs),
        "same_tokens": all(list(plain.tokens) == list(drafted.tokens) for plain, drafted in pairs),
    }


def exact(name: str, model: StoredModel, source: Path, count: int, *, one_thread: bool) -> Rows:
    """Greedy answers of the source's own weights, alone and behind three drafted tokens of the low-bit ones, in turns.

    `agrees` is the share of tokens that are the likeliest of the source in torch, float32 and without a cache, behind
    the same text; bytes are those of matrices that a token reads.
    """
    clock, threads = (time.process_time, 1) if one_thread else (time.perf_counter, 0)
    own, tokenizer, oracle = (
        ExactSource(source, model),
        Tokenizer(model.tokenizer_path),
        Oracle(Checkpoint.open(source)),
    )
    decoder = open_decoder(model, DecoderOptions(kv="fp16", context=1024, threads=threads, exact=own), "cpu")[0]
    full, low = sum(own.matrix(each).nbytes for each in model.spec.linear_names()), decoder.weight_bytes
    text, pairs, agreeing, done = evaluation_text(), list[tuple[Continuation, Continuation]](), 0, 0
    while done < count:
        asked = f"Go on with this text:\n\n{text[300 * len(pairs) % (len(text) - 300) :][:300]}"
        prompt, found = tokenizer.chat([{"role": "user", "content": asked}]), dict[int, Continuation]()
        for gamma in (3, 0) if len(pairs) % 2 else (0, 3):
            how = {"ends": model.spec.eos_token_ids, "clock": clock}
            found[gamma] = continued(decoder, prompt, ANSWER, WAYS["greedy"], FixedGamma(gamma), **how)
        pairs.append((found[0], found[3]))
        given = list(found[0].tokens)
        behind = torch.tensor([[*prompt, *given[:-1]]])
        likeliest = oracle.logits(behind, rows=range(len(prompt) - 1, behind.shape[1]))[0].argmax(-1)
        agreeing, done = agreeing + int((likeliest == torch.tensor(given)).sum()), done + len(given)
    did = [drafted.speculation for _, drafted in pairs]
    rounds, drafts = sum(each.rounds + each.plain for each in did), sum(each.drafted for each in did)
    yield {
        "model": name,
        "answers": len(pairs),
        "tokens": done,
        "agrees": agreeing / done,
        **_speeds(pairs),
        "acceptance_rate": sum(each.acceptance_rate * each.drafted for each in did) / drafts,
        "plain_mb": full / 1e6,
        "mb": (rounds * full + drafts * low) / sum(len(drafted.tokens) - 1 for _, drafted in pairs) / 1e6,
    }
    decoder.close()


def heads(rounds: int, *, one_thread: bool) -> Rows:
    """Drafts of a block that predicts further tokens and none, in turns; of one that is mostly right, and one never."""
    clock, threads = (time.process_time, 1) if one_thread else (time.perf_counter, 0)
    shape = {"hidden": 1024, "intermediate": 4096, "layers": 24, "heads": 16, "kv_heads": 4, "vocab": 8192}
    prompt = np.random.default_rng(2).integers(0, 8192, 64).tolist()
    for name, share in (("mostly right", 0.46), ("never right", 2.0)):
        model = Foreseeing(llama(**shape, context=1024), share)
        decoder: Any = open_decoder(model, DecoderOptions(kv="int4", context=1024, threads=threads, mtp=True), "cpu")[0]
        costs_of = measure_costs(decoder, block=decoder.mtp)
        for way, sampling in WAYS.items():
            pairs, gamma, drafts = [], AdaptiveGamma(costs_of, by_head=True), MtpDrafts(decoder.mtp)
            for _ in range(rounds):
                alone = continued(decoder, prompt, 512, sampling, FixedGamma(0), clock=clock)
                gamma.begin()
                pairs.append((alone, continued(decoder, prompt, 512, sampling, gamma, mtp=drafts, clock=clock)))
            did = pairs[-1][1].speculation
            about = {"head": name, "way": way, "step_ms": 1e3 * costs_of.plain, "draft_ms": 1e3 * costs_of.draft}
            yield {**about, "acceptance_rate": did.acceptance_rate, "gamma": did.gamma, **_speeds(pairs)}
        decoder.close()


PARTS = ("acceptance", "sensitive", "equal", "memory", "costs", "speed", "copied", "heads", "exact")


def measure(part: str, stored: Sequence[tuple[str, StoredModel]], given: Any) -> Rows:
    """All rows of a part."""
    if part == "heads":
        yield from heads(given.rounds, one_thread=given.one_thread)
        return
    for name, model in stored:
        if part in ("acceptance", "sensitive", "equal"):
            yield from {"acceptance": acceptance, "sensitive": sensitive, "equal": equal}[part](name, model)
        elif part == "speed":
            yield from speed(name, model, given.rounds)
        elif part == "memory":
            yield from memory(name, {"stored": str(model.path)}, CONTEXTS)
        elif part == "exact":
            if given.exact_source is not None:
                yield from exact(name, model, given.exact_source, given.tokens, one_thread=given.one_thread)
        elif part == "copied":
            yield from copied(name, model, given.rounds, one_thread=given.one_thread)
        else:
            yield from costs(name, model, CONTEXTS, tuple(TARGETS))
    for bits in given.shape_bits:
        name = f"1.1 B shape, {bits} bits"
        if part == "memory":
            yield from memory(name, {"shape": bits}, SHAPE_CONTEXTS)
        elif part == "costs":
            shape = RandomModel(llama_1b(SHAPE_CONTEXTS[-1] + _ROOM), bits)
            yield from costs(name, shape, SHAPE_CONTEXTS, ("residual", "base"))


def main() -> None:
    """Measure, print, and store each part beside the others."""
    options = parser(__doc__, "speculation")
    options.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--shape-bits", nargs="*", type=int, default=[3], help="of the shape; none: not it")
    options.add_argument("--exact-source", type=Path, help="checkpoint of the stored models, for the part exact")
    options.add_argument("--tokens", type=int, default=10000, help="of the part exact")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument(
        "--one-thread", action="store_true", help="time copied and the head's drafts by a thread's processor time"
    )
    given = options.parse_args()
    for part in given.only:
        rows = list(measure(part, opened(given.stored), given))
        print(part, columns(rows), sep="\n", flush=True)
        write(
            given.out, {**read(given.out), part: {"about": about_run("python -m tests.lab.speculation"), "rows": rows}}
        )


if __name__ == "__main__":
    main()
