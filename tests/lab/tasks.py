"""What compression costs in tasks of SmolLM2: keys in long prompts, sums, objects, chats, drift, JSON and tool calls.

    python -m tests.lab.tasks --smollm2 FOLDER
    python -m tests.lab.tasks --only chats,forms

FOLDER holds SmolLM2-135M-Instruct as a Hugging Face checkpoint in fp16; its models are a trellis. Kinds of cache are
compared with fp16 over the same weights (4 bits, k_chunk 64), bits with full precision: the checkpoint, and in `forms`
the GGUF file that it was made from, whose weights are kept bit for bit. Every comparison is paired: the
same questions, and an interval of 95 % of the mean difference. A run that was stopped goes on where it was, with the
same code.

An answer is right if each of its tokens is the most likely one after those before it, as greedy decoding finds it.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assets import calibration_text
from models.oracle import Oracle
from models.progress import never_cancelled
from models.quantize import kept_by_default, quantize
from models.store import Store, StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.engine.engine import Engine
from runtime.kv.kinds import KVKind
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import Window, negative_log_likelihood, scores
from runtime.text.constraint import Grammar
from runtime.text.divergence import Outline
from runtime.text.sampling import SamplingOptions
from runtime.text.schema_process import problem_of
from runtime.text.tokenizer import Tokenizer
from tests.lab import tool_calls
from tests.lab.caches import ORDER
from tests.lab.models import DATA, SMOLLM2, smollm2
from tests.lab.quality import ALL_RESIDUALS, Laboratory, Point
from tests.lab.store import ROOT, Entries, about_run, attempt, digest, listed, parser, table, version
from tests.real_models import gguf_file

PARTS = ("chats", "drift", "forms", "keys")
LENGTHS = (1000, 2000, 4000, 7000)
"""Tokens of the prompts that hide keys."""
DEPTHS = (0.125, 0.375, 0.625, 0.875)
"""Where a key stands in its prompt."""
HAYSTACKS = 3
"""Prompts of each length that hide a key for each depth."""
CHAINS, SUMS, EXAMPLES = 16, 5, 24
"""Chains of sums, sums of a chain, and chains that are shown before: more than a window of recent tokens."""
ANSWER, QUESTIONS = 200, 20
"""Tokens of a chat's answer, and questions, evenly from MT-Bench and Vicuna-bench."""
TEXTS, DRIFT = 4, (256, 512, 1024, 2048)
"""Texts whose drift is read, and where its parts end, in tokens."""
BUILD = ROOT / "build" / "tasks"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
CITIES = ("Paris", "Tokyo", "Lima", "Oslo", "Cairo", "Madrid", "Boston", "Sydney", "Nairobi", "Berlin")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_OUTLINED, _ROWS, _CONTEXT = 256, 32, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A model, and how it runs."""

    bits: int = 4
    k_chunk: int = 64
    kv: KVKind = "fp16"

    def __str__(self) -> str:
        return f"{self.bits} bits, k_chunk {self.k_chunk}, {self.kv}"


BY_BITS = tuple(Way(bits=bits, k_chunk=k_chunk) for bits in (3, 4) for k_chunk in (0, 16, 64))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, and questions behind it, each with its answer."""

    text: str
    questions: Sequence[tuple[str, str]]


def pass_keys(tokens: int, count: Callable[[str], int]) -> Iterator[Prompt]:
    """A key among lines that say nothing, at each depth (passkey retrieval, Mohtashami and Jaggi 2023)."""
    for depth in DEPTHS:
        key = random.Random(f"{tokens} {depth}").randrange(10000, 100000)
        lines = [FILLER] * (tokens // count(FILLER))
        lines.insert(int(depth * len(lines)), f"The pass key is {key}. Remember it. {key} is the pass key.\n")
        about = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
        yield Prompt(about + "".join(lines), [("What is the pass key? The pass key is", f" {key}")])


def retrieval(tokens: int, count: Callable[[str], int]) -> Iterator[Prompt]:
    """A key of one city at each depth of prose; each is asked for."""
    sentences = re.split(r"(?<=[.!?])\s+", calibration_text())
    for haystack in range(HAYSTACKS):
        rng = random.Random(f"{tokens} {haystack}")
        at, total, told = rng.randrange(len(sentences)), 0, list[str]()
        while total < tokens:
            told.append(sentences[at % len(sentences)])
            total, at = total + count(" " + told[-1]), at + 1
        keys = {city: rng.randrange(10000, 100000) for city in rng.sample(CITIES, len(DEPTHS))}
        for depth, (city, key) in reversed([*zip(DEPTHS, keys.items(), strict=True)]):
            needle = f"The pass key of {city} is {key}. Remember it. {key} is the pass key of {city}."
            told.insert(int(depth * len(told)), needle)
        asked = [(f"\n\nWhat is the pass key of {c}? The pass key of {c} is", f" {key}") for c, key in keys.items()]
        yield Prompt(" ".join(told), asked)


def sums(_tokens: int, _count: Callable[[str], int]) -> Iterator[Prompt]:
    """Chains of sums behind examples of them; asked is the result of each sum, behind the right ones before it."""
    rng = random.Random(0)

    def chain() -> list[tuple[str, str]]:
        value, steps = rng.randrange(1, 10), list[tuple[str, str]]()
        text = f"Start with {value}."
        for _ in range(SUMS):
            more = rng.randrange(1, 10)
            text += f" Add {more}: {value} + {more} ="
            value += more
            steps.append((text, f" {value}"))
            text += f" {value}."
        return steps

    shown = "".join("".join(chain()[-1]) + ".\n" for _ in range(EXAMPLES))
    yield Prompt(shown, [step for _ in range(CHAINS) for step in chain()])


def objects(_tokens: int, _count: Callable[[str], int]) -> Iterator[Prompt]:
    """Sentences and what they say as JSON, behind examples of such."""
    told = [(f"{wanted['name']} is {wanted['age']} years old and lives in {wanted['city']}.\n", json.dumps(wanted))
            for _, wanted in _forms(tool_calls.PEOPLE)]  # fmt: skip
    random.Random(0).shuffle(told)
    yield Prompt("".join(f"{text}{said}\n\n" for text, said in told[:EXAMPLES]), told[EXAMPLES:])


SHORT = {"sums": sums, "objects": objects}
"""Tasks whose prompts have one length."""
TASKS = {"pass-key": pass_keys, "retrieval": retrieval, **SHORT}


class Tasks:
    """Measures SmolLM2."""

    def __init__(self, laboratory: Laboratory) -> None:
        self.laboratory, self.entries, self.tell = laboratory, laboratory.entries, laboratory.tell
        self.tokenizer = Tokenizer(laboratory.case.folder)

    @contextmanager
    def opened(self, way: Way | None, **sizes: int) -> Iterator[Decoder]:
        """A way's decoder; of the source's own weights, if None."""
        model = self._kept() if way is None else self.laboratory.stored(Point(method="trellis", bits=way.bits))
        sizes, way = {"context": _CONTEXT, "max_rows": 256, **sizes}, way or Way(k_chunk=0)
        prompts = ALL_RESIDUALS if way.k_chunk else 0
        options = DecoderOptions(kv=way.kv, k_chunk=way.k_chunk, prompt_k_chunk=prompts, **sizes)
        decoder, _ = open_decoder(model, options, "cpu")
        try:
            yield decoder
        finally:
            decoder.close()

    def _kept(self) -> StoredModel:
        store, name, source = Store(BUILD / "store"), f"kept-{version('models')}", gguf_file()
        if name not in store:
            quantize(source, store, kept_by_default(source), name=name)
        return store.open(name)

    def keys(self, way: Way | None, task: str, tokens: int) -> None:
        """A task's answers by a way, or in full precision."""

        def measure() -> dict[str, Any]:
            prompts, found = TASKS[task](tokens, lambda text: len(self._encode(text))), list[tuple[float, bool]]()
            if way is None:
                oracle = Oracle(self.laboratory.checkpoint)
                found = [one for prompt in prompts for one in self._exactly(oracle, prompt)]
            else:
                with self.opened(way) as decoder:
                    found = [one for prompt in prompts for one in self._answered(decoder, prompt)]
            self.tell(f"{task} {tokens}, {way or 'full precision'}: {sum(right for _, right in found)} of {len(found)}")
            return {
                **(asdict(way) if way else _FULL),
                "task": task,
                "tokens": tokens,
                "right": [int(right) for _, right in found],
                "nats": [round(nats, 4) for nats, _ in found],
            }

        self.entries.known("keys", [asdict(way) if way else None, task, tokens], measure)

    def _answered(self, decoder: Decoder, prompt: Prompt) -> Iterator[tuple[float, bool]]:
        """Nats of each answer, and whether it is right."""
        text, most = self._encode(prompt.text), decoder.options.max_rows
        with decoder.session():
            decoder.cache.clear(0)
            for at in range(0, len(text), most):
                decoder.forward(Step.of(text[at : at + most], at, [], prefill=True))
            for question, answer in prompt.questions:  # the cache is cut back to the text each time
                asked, said = self._encode(question), self._encode(answer)
                logits = [
                    decoder.forward(Step.of(asked, len(text), [len(asked) - 1], prefill=True, flush=False)).copy(),
                    decoder.forward(Step.of(said[:-1], len(text) + len(asked), flush=False)).copy(),
                ]
                yield _judged(np.concatenate(logits), said)

    def _exactly(self, oracle: Oracle, prompt: Prompt) -> Iterator[tuple[float, bool]]:
        text = self._encode(prompt.text)
        pairs = [(self._encode(question), self._encode(answer)) for question, answer in prompt.questions]
        cache = oracle.cache(1, len(text) + max(len(asked) + len(said) for asked, said in pairs))
        oracle.logits(torch.tensor([text]), cache, rows=[-1])
        for asked, said in pairs:
            cache.length = len(text)
            tokens = [*asked, *said[:-1]]
            rows = range(len(asked) - 1, len(tokens))
            yield _judged(oracle.logits(torch.tensor([tokens]), cache, rows=rows)[0].float().numpy(), said)

    def chats(self, way: Way) -> None:
        """How far answers agree with those in full precision, and how close the next tokens are along these."""

        def measure() -> dict[str, Any]:
            agreed, nats, same = list[int](), list[float](), list[float]()
            with self.opened(way, context=1024) as decoder:
                for tokens, prompt, full in self._answers():
                    kl, leads = _apart(decoder, tokens, prompt, full)
                    agreed.append(int(np.argmin([*leads, False])))
                    nats.append(round(float(kl.mean()), 5))
                    same.append(round(100 * float(np.mean(leads)), 2))
            self.tell(f"chats, {way}: {statistics.mean(agreed):.1f} tokens, {statistics.mean(nats):.3f} nats")
            return {**asdict(way), "agreed": agreed, "kl": nats, "same": same}

        self.entries.known("chats", [asdict(way), QUESTIONS, ANSWER], measure)

    def _answers(self) -> Iterator[tuple[list[int], int, Outline]]:
        """Prompts with greedy answers in full precision: tokens, those of the prompt, and the distributions."""
        oracle, ends = Oracle(self.laboratory.checkpoint), self.laboratory.checkpoint.spec.eos_token_ids
        BUILD.mkdir(parents=True, exist_ok=True)
        for question in (one for name in ("mt_bench", "vicuna_bench") for one in _questions(name)):
            prompt = self.tokenizer.chat([{"role": "user", "content": question}])
            file = BUILD / f"full-{digest([prompt, ANSWER, version('models')])}.npz"
            if not file.is_file():
                cache, read, found = oracle.cache(1, len(prompt) + ANSWER), prompt, list[Any]()
                while len(found) < ANSWER and not (found and read[0] in ends):
                    found.append(oracle.logits(torch.tensor([read]), cache, rows=[-1])[0].float().numpy())
                    read = [int(found[-1].argmax())]
                half = file.with_name("half.npz")
                np.savez(half, **asdict(Outline.of(np.concatenate(found), _OUTLINED)))
                half.replace(file)
                self.tell(f"in full precision: {len(found)} tokens")
            with np.load(file) as kept:
                full = Outline(kept["tokens"], kept["probabilities"])
            yield [*prompt, *map(int, full.tokens[:, 0])], len(prompt), full

    def drift(self, kinds: Sequence[KVKind]) -> None:
        """KL from fp16 along sampled texts, part by part (GEAR Fig. 1b)."""
        texts, fulls = list[list[int]](), list[Outline]()
        with self.opened(Way()) as decoder:
            beginnings = self._encode(calibration_text())
            for seed in range(TEXTS):
                start = beginnings[4000 * seed : 4000 * seed + 128]
                texts.append([*start, *self._sampled(decoder, start, DRIFT[-1], seed)])
                part = Window(0, len(texts[-1]), len(start), len(start))
                with decoder.session():
                    read = scores(decoder, np.asarray(texts[-1], np.int64), part, _ROWS, never_cancelled)
                    fulls.append(Outline.joined([Outline.of(logits, _OUTLINED) for logits, _ in read]))

        def measure(kind: KVKind) -> dict[str, Any]:
            with self.opened(Way(kv=kind)) as decoder:
                each = [_apart(decoder, text, 128, full)[0] for text, full in zip(texts, fulls, strict=True)]
            borders = (0, *DRIFT)
            kl = [[round(float(one[a:b].mean()), 5) for one in each] for a, b in zip(borders, DRIFT, strict=False)]
            self.tell(f"drift, {kind}: {[round(statistics.mean(part), 4) for part in kl]}")
            return {**asdict(Way(kv=kind)), "until": DRIFT, "kl": kl}

        for kind in kinds:
            self.entries.known("drift", [kind, DRIFT, TEXTS], lambda k=kind: measure(k))

    def _sampled(self, decoder: Decoder, start: Sequence[int], count: int, seed: int) -> list[int]:
        """A text that goes on, at temperature 1, never at its end."""
        ends = self.laboratory.checkpoint.spec.eos_token_ids
        engine = Engine(decoder, self.tokenizer, name="drift", eos_token_ids=ends)
        never = tuple((token, -100.0) for token in ends)
        options = SamplingOptions(temperature=1.0, top_p=1.0, seed=seed, max_tokens=count, logit_bias=never)
        return [piece.token for piece in engine.generate(start, options) if piece.token is not None]

    def forms(self, way: Way | None) -> None:
        """JSON with and without its grammar, and required tool calls: valid, and right."""

        def measure() -> dict[str, Any]:
            found: dict[str, Any] = {}
            with self.opened(way, context=2048, slots=2) as decoder:
                ends = self.laboratory.checkpoint.spec.eos_token_ids
                engine = Engine(decoder, self.tokenizer, name="forms", eos_token_ids=ends)
                for name, grammar in (("free", None), ("grammar", Grammar.of_schema(SCHEMA))):
                    judged = [
                        _fitting(self._said(engine, asked, grammar), wanted)
                        for asked, wanted in _forms(tool_calls.PEOPLE[:5])
                    ]
                    found |= {f"{name} valid": [v for v, _ in judged], f"{name} right": [r for _, r in judged]}
                asker = tool_calls.Asker(engine)
                calls = [tool_calls.judge(one, asker.ask(one.text, required=True)[1]) for one in _CALLS]
                found |= {f"call {name}": [int(one[name]) for one in calls] for name in ("valid", "tool", "right")}
            self.tell(f"forms, {way or 'full precision'}: { {name: sum(each) for name, each in found.items()} }")
            return {**(asdict(way) if way else _FULL), **found}

        self.entries.known("forms", [asdict(way) if way else None, len(_CALLS)], measure)

    def _said(self, engine: Engine, asked: str, grammar: Grammar | None) -> str:
        prompt = engine.chat_prompt([{"role": "user", "content": asked}])
        options = SamplingOptions(temperature=0, max_tokens=100, grammar=grammar)
        return "".join(piece.text for piece in engine.generate(prompt, options))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)


_CALLS = [*tool_calls.requests()][::4]
_FULL = {"bits": 16, "k_chunk": 0, "kv": "exact"}
"""A way's fields in entries of full precision."""


def _forms(people: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Requests for JSON, and what it should say."""
    for number, (name, city) in enumerate((name, city) for name in people for city in CITIES[:4]):
        wanted = {"name": name, "age": 20 + 7 * number % 60, "city": city}
        text = f"{name} is {wanted['age']} years old and lives in {city}."
        yield f"{text} Answer with a JSON object with the keys name, age and city, and nothing else.", wanted


def _fitting(said: str, wanted: Mapping[str, Any]) -> tuple[int, int]:
    """Whether an answer, without its fence, is JSON that fits the schema, and whether it says what it should."""
    text = re.sub(r"^```(json)?|```$", "", said.strip()).strip()
    valid = problem_of(text, SCHEMA) is None
    return int(valid), int(valid and json.loads(text) == wanted)


def _questions(name: str) -> list[str]:
    """Some first turns of a benchmark, evenly."""
    lines = (DATA / "prompts" / f"{name}_question.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:: 2 * len(lines) // QUESTIONS]]


def _judged(logits: Any, said: Sequence[int]) -> tuple[float, bool]:
    wanted = np.asarray(said, np.int64)
    return negative_log_likelihood(logits, wanted), bool((logits.argmax(1) == wanted).all())


def _apart(decoder: Decoder, tokens: Sequence[int], prompt: int, full: Outline) -> tuple[Any, list[bool]]:
    """Of each token behind the prompt: KL from known distributions in nats, and whether the same token leads."""
    kl, same = list[float](), list[bool]()
    part = Window(0, len(tokens), prompt, prompt)
    with decoder.session():
        for logits, _ in scores(decoder, np.asarray(tokens, np.int64), part, _ROWS, never_cancelled):
            for row in logits:
                own = full.rows(len(kl), len(kl) + 1)
                same.append(int(row.argmax()) == own.tokens[0, 0])
                kl.append(own.divergence(row[None]))
    return np.asarray(kl), same


def interval(values: Sequence[float]) -> str:
    """The mean and half of its interval of 95 %; of paired differences, a tie where that spans 0."""
    return f"{statistics.mean(values):.2f} ± {1.96 * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def by_cache(found: Mapping[str, Any]) -> str:
    """Tasks by kind of cache, over the same weights."""
    rows = []
    for kind in ORDER:
        own, exact = (_known(found, "keys", Way(kv=each)) for each in (kind, "fp16"))
        apart = [a - b for at in own.keys() & exact.keys() if at[0] not in SHORT for a, b in _pairs(own[at], exact[at])]
        cells = [_right(own, task, LENGTHS) for task in ("pass-key", "retrieval")]
        drift = next((one["kl"] for one in found["sections"].get("drift", ()) if one["kv"] == kind), [])
        nats = interval(apart) if apart and kind != "fp16" else ""
        short = (_right(own, task, (0,)) for task in SHORT)
        rows.append((kind, *cells, nats, *short, *(f"{statistics.mean(kl):.3f}" for kl in drift)))
    head = ("", *(f"{task}, 1k, 2k, 4k, 7k" for task in ("pass-key", "retrieval")), "nats a key more", *SHORT)
    ends = [f"{a}–{b}" for a, b in zip((1, *DRIFT), DRIFT, strict=False)]
    width = max(map(len, rows))
    return table(
        [*head, *(f"KL, tokens {end}" for end in ends)][:width], [(*row, *[""] * (width - len(row))) for row in rows]
    )


def by_bits(found: Mapping[str, Any]) -> str:
    """Tasks by bits and compensation, over an exact cache."""
    exact, rows = _known(found, "keys", None), list[Sequence[object]]()
    for way in (None, *BY_BITS):
        own = _known(found, "keys", way)
        cells: list[object] = [_right(own, task, (1000,)) for task in ("pass-key", "retrieval")]
        cells += [_right(own, task, (0,)) for task in SHORT]
        pairs = _pairs(own[at], exact[at]) if way and (at := ("sums", 0)) in own.keys() & exact.keys() else ()
        cells.append(interval([a - b for a, b in pairs]) if pairs else "")
        for section, fields in (("chats", ("agreed", "kl", "same")), ("forms", _FORMS)):
            one = next((e for e in found["sections"].get(section, ()) if _is_of(e, way)), None)
            if section == "chats":
                cells += [interval(one[field]) if one else "" for field in fields]
            else:
                cells += [f"{sum(one[field])} of {len(one[field])}" if one else "" for field in fields]
        rows.append((f"{way.bits} bits, k_chunk {way.k_chunk}" if way else "full precision", *cells))
    head = (
        "",
        "pass-key",
        "retrieval",
        *SHORT,
        "nats a sum more",
        "tokens as in full precision",
        "KL",
        "same top token, %",
    )
    return table((*head, "JSON", "right", "JSON by grammar", "right", "calls", "right tool", "right in all"), rows)


_FORMS = ("free valid", "free right", "grammar valid", "grammar right", "call valid", "call tool", "call right")


def _is_of(entry: Mapping[str, Any], way: Way | None) -> bool:
    return all(entry[name] == value for name, value in (asdict(way) if way else _FULL).items())


def _known(found: Mapping[str, Any], section: str, way: Way | None) -> dict[tuple[str, int], Mapping[str, Any]]:
    """A way's entries by task and length; of full precision, if None."""
    entries = found["sections"].get(section, ())
    return {(e["task"], e["tokens"]): e for e in entries if _is_of(e, way)}


def _pairs(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [*zip(own["nats"], other["nats"], strict=True)]


def _right(own: Mapping[tuple[str, int], Mapping[str, Any]], task: str, lengths: Sequence[int]) -> str:
    """How many answers are right at each length, of how many."""
    known = [own[task, tokens]["right"] for tokens in lengths if (task, tokens) in own]
    return f"{', '.join(str(sum(right)) for right in known)} of {len(known[0])}" if known else ""


def measure(tasks: Tasks, parts: Sequence[str]) -> None:
    """Fill the gaps in the results."""
    tell = tasks.tell
    for way in BY_BITS if "chats" in parts else ():
        attempt(tell, f"chats, {way}", lambda w=way: tasks.chats(w))
    if "drift" in parts:
        attempt(tell, "drift", lambda: tasks.drift(ORDER))
    for one in (None, *BY_BITS) if "forms" in parts else ():
        attempt(tell, f"forms, {one or 'full precision'}", lambda w=one: tasks.forms(w))
    if "keys" in parts:
        long = [(task, tokens) for task in ("pass-key", "retrieval") for tokens in LENGTHS]
        short = [(task, 0) for task in SHORT]
        cases = [(Way(kv=kind), *one) for kind in ORDER for one in (*short, *long)]
        cases += [(way, *one) for way in (*BY_BITS, None) for one in (*short, long[0], long[len(LENGTHS)])]
        for way, task, tokens in sorted(dict.fromkeys(cases), key=lambda case: case[2]):
            attempt(tell, f"{task} {tokens}, {way}", lambda w=way, t=task, n=tokens: tasks.keys(w, t, n))


def main() -> None:
    """Measure what is missing, and print how much is known."""
    options = parser(__doc__, "tasks")
    options.add_argument("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    options.add_argument("--only", type=listed, default=PARTS, help=f"some of {', '.join(PARTS)}")
    options.add_argument("--again", action="store_true", help="measure even what this code has measured")
    given = options.parse_args()
    entries = Entries(given.out, given.only if given.again else ())
    entries.about = about_run("python -m tests.lab.tasks")
    measure(Tasks(Laboratory(smollm2(given.smollm2), entries)), given.only)
    entries.finish()
    print({part: len(entries.all(part)) for part in given.only})


if __name__ == "__main__":
    main()
