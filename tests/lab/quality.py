"""The cost of quantizing and the gain of compensation on SmolLM2 and on Gemma 3 270M, beside llama.cpp.

    python -m tests.lab.quality --smollm2 FOLDER --peer-python PYTHON      all; hours
    python -m tests.lab.quality --smollm2 FOLDER --only points --bits 3
    python -m tests.lab.quality --gemma FILE.gguf --peer-python PYTHON     Gemma 3 270M, token by token

FOLDER holds SmolLM2-135M-Instruct as a Hugging Face checkpoint in fp16; Gemma's full precision is FILE, dequantized.
Every number goes the program's own way: quantize, store, CPU decoder, perplexity on WikiText-2; plain, each token
decoded, or as a chat: the first half of a window is a prompt, the second half is decoded and scored. A run that was
stopped goes on where it was, with the same code. Interpreters with llama.cpp: see llama.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assets import calibration_text, evaluation_text
from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.quantize import quantize
from models.recipe import DEFAULT_GROUP_SIZE, DEFAULT_METHOD, QOQ_STEPS, Recipe, chosen_method
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from models.store import Store, StoredModel
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import Decoder, DecoderOptions, Selector, Step
from runtime.budget.prompt_tuning import tune_prompts
from runtime.budget.tuning import refine, tune
from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT
from runtime.kv.kinds import KVKind
from runtime.load.plan import open_decoder, open_engine
from runtime.measure.evaluate import EvalResult, full_precision_perplexity, perplexity, tokens_of, windows
from runtime.measure.speed import peak_memory_bytes
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.lab.compare import full_precision, job, peer
from tests.lab.logits import theirs
from tests.lab.measure import closing_all
from tests.lab.models import SMOLLM2, Case, gemma, smollm2
from tests.lab.store import RESULTS, ROOT, Entries, about_run, attempt, columns, digest, listed, parser, teller, version
from tuner.profiles import ProfileStore

PARTS = ("full", "points", "qoq", "budgets", "peers", "closeness", "answers")
BUILD = ROOT / "build" / "quality"
CURVE = (0, 16, 64)
"""k_chunk that every method is measured with."""
DETAILED = ("trellis", DEFAULT_METHOD, "rtn")
"""Methods that are also measured at 4 bits, and whose prompts and answers are compensated apart, too."""
COMPARED = ("rtn", "trellis")
"""Methods with which selectors and bits of the residuals are compared."""
SELECTORS: tuple[Selector, ...] = ("approx", "exact", "static", "random")
RESIDUALS: dict[int, tuple[int, ...]] = {2: (32, 128), 4: (16, 64), 8: (8, 32), 16: (4, 16)}
"""k_chunk by bits of the residuals; numbers in the same place fetch the same bytes of rows (QDEC Table 1)."""
ALL_RESIDUALS = CpuBackend.prompt_levels[0]
"""Channels of 1024 that the rows of a prompt share by default."""
BUDGETS = (5.0, 10.0)
KINDS = ("Q2_K", "Q3_K_M", "IQ3_M", "Q4_0", "Q4_K_M")
"""llama.cpp's quantizations, each with an importance matrix."""
CLOSE = (("trellis", 2, 0), ("trellis", 2, 64), *itertools.product(("trellis", DEFAULT_METHOD), (3, 4), (0, 16, 64)))
"""Method, bits and k_chunk of models that are compared token by token; where one is, all of a prompt is compensated."""
ORDER = (*itertools.product((3, 4), ("trellis", DEFAULT_METHOD)), (2, "trellis"), (3, "rtn"), (4, "rtn"))
"""Bits and method of Gemma's models, each with nothing, 16 and 64 channels restored."""
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three animals that can fly.",
    "Explain in one sentence what a computer program is.",
)
ANSWER = 60
"""Tokens of an answer at most."""
_INPUTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""GGUF's names of the matrices that read a linear layer's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A model made by a recipe, run in one way."""

    method: str = DEFAULT_METHOD
    bits: float = 3
    group_size: int = DEFAULT_GROUP_SIZE
    residual_bits: int = 4
    select: Selector = "approx"
    k_chunk: int = 0
    """Compensated channels of 1024 of a decoded token."""
    as_chat: bool = False
    prompt_k_chunk: int = 0
    """Channels of 1024 that the rows of a prompt share."""
    kv: KVKind = "fp16"
    steps: tuple[str, ...] = ()
    """Steps of QoQ."""

    @property
    def recipe(self) -> Recipe:
        """How its model is made."""
        if self.method == "qoq":
            return Recipe.usual("qoq", group_size=self.group_size, **{step: step in self.steps for step in QOQ_STEPS})
        return Recipe(method=self.method, bits=self.bits, group_size=self.group_size, residual_bits=self.residual_bits)


def points() -> Iterator[Point]:
    """Every method's curve at 3 bits, plain and as a chat (QDEC Fig. 12), chats at 4, selectors and residuals' bits.

    What the page shows, and no more; the latter two are QDEC's Fig. 15 and 16, and Table 1.
    """
    for bits, method, k_chunk in itertools.product((3, 4), METHODS, CURVE):
        if bits == 3 or method in DETAILED:
            chat = Point(method=method, bits=bits, k_chunk=k_chunk, as_chat=True)
            yield replace(chat, prompt_k_chunk=ALL_RESIDUALS * (k_chunk > 0))
            if method in DETAILED and k_chunk:
                yield chat
    yield from (Point(method=method, k_chunk=k_chunk) for method, k_chunk in itertools.product(METHODS, CURVE))
    for method, k_chunk, select in itertools.product(COMPARED, CURVE[1:], SELECTORS[1:]):
        yield Point(method=method, k_chunk=k_chunk, select=select)
    for method, (bits, numbers) in itertools.product(COMPARED, RESIDUALS.items()):
        if bits != Point().residual_bits:
            yield from (Point(method=method, residual_bits=bits, k_chunk=k_chunk) for k_chunk in numbers)


def recipes() -> Iterator[Recipe]:
    """Of all models that are made."""
    close = (Point(method=method, bits=bits) for method, bits, _ in CLOSE)
    yield from (point.recipe for point in itertools.chain(points(), qoq(), close))


def qoq() -> Iterator[Point]:
    """AWQ and QoQ, whole and by its steps, over a cache of 4 bits (QServe Table 2, Fig. 12)."""
    smooth, rest = "smooth_attention", ("smooth_outputs", "clip")
    recipes = [
        (DEFAULT_GROUP_SIZE * 2, (smooth, "reorder", *rest)),
        (DEFAULT_GROUP_SIZE * 2, ("clip",)),
        (DEFAULT_GROUP_SIZE * 2, (smooth, *rest)),
        (DEFAULT_GROUP_SIZE * 2, (smooth, "rotate", "reorder", *rest)),
        (DEFAULT_GROUP_SIZE * 2, ()),
        (0, (smooth, *rest)),
        (0, rest),
        (0, ()),
    ]
    for as_chat in (False, True):
        yield Point(method="awq", bits=4, group_size=128, residual_bits=0, kv="int4", as_chat=as_chat)
        for group_size, steps in recipes:
            yield Point(method="qoq", bits=4, group_size=group_size, kv="int4", steps=steps, as_chat=as_chat)


def numbers(result: EvalResult) -> dict[str, Any]:
    """What is kept of an evaluation."""
    return {
        "perplexity": round(result.perplexity, 5),
        "tokens": result.tokens,
        "recall": None if result.recall is None else round(result.recall, 4),
        "seconds": round(result.seconds, 2),
    }


class Laboratory:
    """Measures a real model."""

    def __init__(self, case: Case, entries: Entries) -> None:
        self.case, self.entries, self.tell = case, entries, teller()
        self.checkpoint, self.tokens = Checkpoint.open(case.folder), self.case.text()
        self._store = Store(BUILD / "store" / case.name)

    def full(self, as_chat: bool) -> dict[str, Any]:
        """The checkpoint's own perplexity."""
        case = self.case
        return self.entries.known(
            "full",
            ["full", as_chat],
            lambda: {
                "model": self.case.name,
                "as_chat": as_chat,
                **numbers(
                    full_precision_perplexity(self.checkpoint, self.tokens, case.window, case.stride, as_chat=as_chat)
                ),
            },
        )

    def stored(self, point: Point) -> StoredModel:
        """A point's model; made, timed and measured in a process of its own if this code has not done it."""
        name = f"{point.method}-{digest([point.recipe.to_json(), version('models')])}"
        entry = self.entries.known("stored", point.recipe.to_json(), lambda: self._made(point, name))
        if name not in self._store:
            self._made(point, name)
        self.tell(f"{point.method} at {point.bits:g} bits: {entry['seconds']:.0f} s")
        return self._store.open(name)

    def _made(self, point: Point, name: str) -> dict[str, Any]:
        """Seconds from the process's start, and its largest memory, which never shrinks in a process that goes on."""
        if name in self._store:
            self._store.remove(name)
        asked = [
            str(self.case.folder),
            str(self._store.root),
            json.dumps(point.recipe.to_json()),
            name,
            str(time.time()),
        ]
        command = [sys.executable, "-m", "tests.lab.quality", "--make", *asked]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1][:300])
        summary = self._store.open(name).info.summary
        return {
            "model": self.case.name,
            **{field: getattr(point, field) for field in ("method", "bits", "group_size", "residual_bits")},
            "bits_per_weight": summary.bits_per_weight,
            "gpu_bytes": summary.gpu_bytes,
            "residual_bytes": summary.residual_bytes,
            **json.loads(done.stdout.splitlines()[-1]),
        }

    def point(self, point: Point, section: str = "points") -> None:
        """The perplexity of a point."""

        def measure() -> dict[str, Any]:
            recall = section == "points" and point.select == "approx" and point.bits == 3 and not point.as_chat
            options = DecoderOptions(
                context=self.case.window,
                kv=point.kv,
                k_chunk=point.k_chunk,
                prompt_k_chunk=point.prompt_k_chunk,
                select=point.select,
                measure_recall=recall and point.k_chunk > 0,
            )
            decoder, _ = open_decoder(self.stored(point), options, "cpu")
            try:
                result = perplexity(decoder, self.tokens, self.case.window, self.case.stride, as_chat=point.as_chat)
            finally:
                decoder.close()
            self.tell(f"{point}: {result.perplexity:.3f}")
            return {"model": self.case.name, **asdict(point), "recipe": point.recipe.to_json(), **numbers(result)}

        self.entries.known(section, asdict(point), measure)

    def budget(self, method: str, bits: float, percent: float) -> None:
        """What a chat gets where a budget decides k_chunk, tuned and refined, and prompts have the default budget."""

        def measure() -> dict[str, Any]:
            model = self.stored(Point(method=method, bits=bits))
            decoder, _ = open_decoder(model, DecoderOptions(context=2 * self.case.window), "cpu")
            encode = Tokenizer(model.tokenizer_path).encode
            with tempfile.TemporaryDirectory() as folder:
                profiles = ProfileStore(Path(folder))
                try:
                    tuned = tune(decoder, model, budget_percent=percent, profiles=profiles)
                    prompts = tune_prompts(
                        decoder, model, budget_percent=DEFAULT_PROMPT_BUDGET_PERCENT, profiles=profiles
                    )
                    tuned = refine(decoder, model, tuned, profiles=profiles, text=evaluation_text(), encode=encode)
                    result = perplexity(decoder, self.tokens, self.case.window, self.case.stride, as_chat=True)
                finally:
                    decoder.close()
            self.tell(f"{method} at {bits:g} bits within {percent:g} %: {result.perplexity:.3f}, {dict(tuned.k_chunk)}")
            about = {"model": self.case.name, "method": method, "bits": bits, "budget_percent": percent}
            slowdowns = {
                "slowdown_percent": tuned.measured_slowdown_percent,
                "prompt_slowdown_percent": prompts.measured_slowdown_percent,
            }
            return {**about, "k_chunk": dict(tuned.k_chunk), **slowdowns, **numbers(result)}

        self.entries.known("budgets", [bits, percent, *([method] if method != DEFAULT_METHOD else ())], measure)

    def peers(self, python: str) -> None:
        """llama.cpp's types, quantized from the same checkpoint and scored in the same windows."""
        self.entries.known("peers", KINDS, lambda: {"model": self.case.name, "rows": list(self._peers(python))})

    def _peers(self, python: str) -> Iterator[dict[str, Any]]:
        parts = [self._parts(as_chat) for as_chat in (False, True)]
        source = full_precision(BUILD / "gguf", "1b", self.case.folder)
        with tempfile.TemporaryDirectory() as scratch, closing_all({"llama.cpp": peer(python)}) as workers:
            folder, llama = Path(scratch), workers["llama.cpp"]
            np.savez(folder / "importance.npz", **importance(self.checkpoint))
            for name, part in zip(("plain", "chat"), parts, strict=True):
                (folder / name).write_text(json.dumps(part), encoding="utf-8")
            for kind in KINDS:
                file, begin = str(folder / "low.gguf"), time.perf_counter()
                job(llama, "quantize", str(source), file, kind, str(folder / "importance.npz"))
                seconds = round(time.perf_counter() - begin, 2)
                row = {"kind": kind, "seconds": seconds, **job(llama, "sizes", file), "version": llama.about["version"]}
                row |= _losses(job(llama, "score", file, str(folder / "plain")))
                row["chat"] = _losses(job(llama, "score", file, str(folder / "chat")))
                self.tell(f"llama.cpp {kind}: {row['perplexity']:.3f}, as a chat {row['chat']['perplexity']:.3f}")
                yield row

    def _parts(self, as_chat: bool) -> list[tuple[list[int], int]]:
        """Tokens of each window, and the first one that is scored in it."""
        cut = windows(len(self.tokens), self.case.window, self.case.stride, as_chat=as_chat)
        text, bos = np.asarray(self.tokens, np.int64), self.checkpoint.spec.bos_token_id
        return [(tokens_of(text, part, bos).tolist(), part.first - part.start) for part in cut]

    def closeness(self, python: str) -> None:
        """How far the next tokens' probabilities in a chat's answers are from full precision's, beside llama.cpp's."""
        self.entries.known(
            "closeness", [KINDS, CLOSE], lambda: {"model": self.case.name, "rows": list(self._closeness(python))}
        )

    def of_gemma(self, given: argparse.Namespace) -> None:
        """The same of each of Gemma's models, and llama.cpp on Gemma's own file."""
        about, full = {"model": self.case.name}, {"method": "full precision"}
        self.entries.known("closeness", ["full"], lambda: about | full | self._apart(one.numpy() for one in self._full))
        chosen = given.bits or "234"
        for (bits, method), k_chunk in itertools.product(ORDER, (0, 64, 16)):
            if str(bits) in chosen and method in given.methods:
                point = Point(method=method, bits=bits, k_chunk=k_chunk)
                what = [method, bits, k_chunk]
                act = partial(self.entries.known, "closeness", what, lambda p=point: about | self._close(p))
                attempt(self.tell, str(what), act)
        if given.peer_python:
            self.entries.known("closeness", ["llama.cpp"], lambda: about | self._own_file(given.peer_python))

    def _own_file(self, python: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch, closing_all({"llama.cpp": peer(python)}) as workers:
            file, llama = Path(scratch) / "own.gguf", workers["llama.cpp"]
            file.symlink_to(self.case.folder.resolve())
            found = (theirs(llama, file, tokens)[first - 1 : -1] for tokens, first in self._chats)
            return {"method": "llama.cpp, own", **job(llama, "sizes", str(file)), **self._apart(found)}

    @cached_property
    def _chats(self) -> list[tuple[list[int], int]]:
        return self._parts(as_chat=True)

    @cached_property
    def _full(self) -> list[torch.Tensor]:
        """Logits of a chat's scored tokens in full precision."""
        oracle = Oracle(self.checkpoint)
        return [
            oracle.logits(torch.tensor([tokens]), rows=range(first - 1, len(tokens) - 1))[0].float()
            for tokens, first in self._chats
        ]

    def _close(self, point: Point) -> dict[str, Any]:
        model, prompts = self.stored(point), ALL_RESIDUALS if point.k_chunk else 0
        sizes = {"context": self.case.window, "max_rows": self.case.window}
        options = DecoderOptions(**sizes, k_chunk=point.k_chunk, prompt_k_chunk=prompts)
        decoder, _ = open_decoder(model, options, "cpu")
        try:
            apart = self._apart(_answered(decoder, *part) for part in self._chats)
        finally:
            decoder.close()
        name = {"method": point.method, "bits": point.bits, "k_chunk": point.k_chunk}
        found = {**name, "gpu_bytes": model.info.summary.gpu_bytes, **apart}
        self.tell(str(found))
        return found

    def _apart(self, found: Iterable[Any]) -> dict[str, float]:
        """Of logits of a chat's scored tokens: their perplexity, KL(full || found) in nats a token, and the percentage
        of tokens at which the same one leads.
        """
        each, same, nats = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for own, logits, (tokens, first) in zip(self._full, found, self._chats, strict=True):
            low, wanted = torch.from_numpy(logits).log_softmax(-1), own.log_softmax(-1)
            each.append((wanted.exp() * (wanted - low)).sum(-1))
            same.append(low.argmax(-1) == wanted.argmax(-1))
            nats.append(-low.gather(1, torch.tensor(tokens[first:])[:, None]))
        return {
            "perplexity": round(math.exp(float(torch.cat(nats).mean())), 5),
            "kl": round(float(torch.cat(each).mean()), 5),
            "same": round(100 * float(torch.cat(same).float().mean()), 2),
        }

    def _closeness(self, python: str) -> Iterator[dict[str, Any]]:
        for method, bits, k_chunk in CLOSE:
            yield self._close(Point(method=method, bits=bits, k_chunk=k_chunk))
        source = full_precision(BUILD / "gguf", "1b", self.case.folder)
        with tempfile.TemporaryDirectory() as scratch, closing_all({"llama.cpp": peer(python)}) as workers:
            file, importances, llama = (
                Path(scratch) / "low.gguf",
                Path(scratch) / "importance.npz",
                workers["llama.cpp"],
            )
            np.savez(importances, **importance(self.checkpoint))
            for kind in KINDS:
                job(llama, "quantize", str(source), str(file), kind, str(importances))
                found = (theirs(llama, file, tokens)[first - 1 : -1] for tokens, first in self._chats)
                yield {"method": f"llama.cpp {kind}", **job(llama, "sizes", str(file)), **self._apart(found)}

    def answers(self) -> None:
        """Greedy answers in full precision, with 3 bits, and with 3 bits compensated."""
        method = chosen_method("auto")

        def measure() -> dict[str, Any]:
            model = self.stored(Point(method=method))
            full = self._full_answers()
            plain, compensated = (low_bit_answers(model, *both) for both in ((0, 0), (64, ALL_RESIDUALS)))
            rows = [
                {"question": asked, "full": full[asked], "plain": plain[asked], "compensated": compensated[asked]}
                for asked in QUESTIONS
            ]
            return {"model": self.case.name, "method": method, "bits": 3, "k_chunk": 64, "answers": rows}

        self.entries.known("answers", [method, *QUESTIONS], measure)

    def _full_answers(self) -> dict[str, str]:
        tokenizer, oracle, found = Tokenizer(self.case.folder), Oracle(self.checkpoint), {}
        for question in QUESTIONS:
            tokens, cache, answer = tokenizer.chat(_chat(question)), oracle.cache(1, 512), list[int]()
            while len(answer) < ANSWER:
                tokens = [int(oracle.logits(torch.tensor([tokens]), cache, rows=[-1])[0, -1].argmax())]
                if tokens[0] in self.checkpoint.spec.eos_token_ids:
                    break
                answer += tokens
            found[question] = tokenizer.decode(answer).strip()
        return found


def _answered(decoder: Decoder, tokens: list[int], first: int) -> Any:
    """Logits float32 [T, V] of a window's scored tokens: its prompt is prefilled, and the others are decoded."""
    with decoder.session():
        decoder.cache.clear(0)
        found = [decoder.forward(Step.of(tokens[:first], 0, [first - 1], prefill=True)).copy()]
        found += [decoder.forward(Step.of([tokens[at]], at)).copy() for at in range(first, len(tokens) - 1)]
    return np.concatenate(found)


def low_bit_answers(model: StoredModel, k_chunk: int, prompt_k_chunk: int) -> dict[str, str]:
    """A stored model's answers by question."""
    engine = open_engine(model, DecoderOptions(context=512, k_chunk=k_chunk, prompt_k_chunk=prompt_k_chunk), "cpu")
    sampling = SamplingOptions(temperature=0, max_tokens=ANSWER)
    try:
        return {
            question: "".join(p.text for p in engine.generate(engine.chat_prompt(_chat(question)), sampling)).strip()
            for question in QUESTIONS
        }
    finally:
        engine.close()


def _chat(question: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": question}]


def importance(checkpoint: Checkpoint, count: int = 8192, length: int = 256) -> dict[str, Any]:
    """llama.cpp's importance matrix: mean squares of the matrices' inputs on the calibration text, by GGUF's names."""
    sums: dict[str, Any] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + np.square(x[0].float().numpy()).sum(0, dtype=np.float64)

    oracle = Oracle(checkpoint, observe=observe)
    tokens = np.asarray(Tokenizer(checkpoint.path).encode(calibration_text())[:count], np.int64)
    whole = tokens.size // length * length
    for start in range(0, whole, length):
        oracle.logits(torch.from_numpy(tokens[None, start : start + length]))
    found = {}
    for name, values in sums.items():
        mean = (values / whole).astype(np.float32)
        if name == "head":
            found["token_embd.weight" if checkpoint.spec.tied else "output.weight"] = mean
        else:
            _, layer, kind = name.split(".")
            found |= {f"blk.{layer}.{part}.weight": mean for part in _INPUTS[kind]}
    return found


def _losses(nats: Sequence[Sequence[float]]) -> dict[str, Any]:
    each = [one for window in nats for one in window]
    return {"perplexity": round(math.exp(sum(each) / len(each)), 5), "tokens": len(each)}


def make(folder: str, root: str, recipe: str, name: str, begun: str) -> None:
    """Quantize in this process, as `lowbit-chat quantize` does, and print what it took.

    The result is judged, as the command does, only of models whose time the page shows.
    """
    model = Recipe.from_json(json.loads(recipe))
    judged = (model.bits, model.residual_bits) == (3, 4)
    calibration, evaluation = calibration_text(), evaluation_text() if judged else None
    quantize(Path(folder), Store(Path(root)), model, name=name, calibration=calibration, evaluation=evaluation)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds, processor = round(time.time() - float(begun), 2), round(used.ru_utime + used.ru_stime, 2)
    print(json.dumps({"seconds": seconds, "processor_seconds": processor, "peak_bytes": peak_memory_bytes()}))


def measure(laboratory: Laboratory, given: argparse.Namespace) -> None:
    """Fill the gaps in the results."""
    tell, bits = laboratory.tell, {float(one) for one in given.bits or (2, 3, 4)}
    laboratory.entries.keep("points", map(asdict, points()))
    laboratory.entries.keep("stored", (recipe.to_json() for recipe in recipes()))
    for as_chat in (False, True) if "full" in given.only else ():
        laboratory.full(as_chat)
    for section, wanted in (("points", points()), ("qoq", qoq())):
        for point in wanted if section in given.only else ():
            if point.bits in bits and point.method in given.methods:
                attempt(tell, str(point), lambda p=point, s=section: laboratory.point(p, s))
    for method, own, percent in itertools.product(DETAILED[:2], (3.0, 4.0), BUDGETS) if "budgets" in given.only else ():
        if own in bits and method in given.methods:
            what = f"{method} at {own:g} bits within {percent:g} %"
            attempt(tell, what, lambda m=method, b=own, p=percent: laboratory.budget(m, b, p))
    if "peers" in given.only and given.peer_python:
        attempt(tell, "llama.cpp", lambda: laboratory.peers(given.peer_python))
    if "closeness" in given.only and given.peer_python:
        attempt(tell, "closeness", lambda: laboratory.closeness(given.peer_python))
    if "answers" in given.only:
        attempt(tell, "answers", laboratory.answers)


def main() -> None:
    """Measure what is missing, and print it."""
    if sys.argv[1:2] == ["--make"]:
        make(*sys.argv[2:])
        return
    options = parser(__doc__)
    options.add_argument("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    options.add_argument("--gemma", type=Path, help="Gemma 3 270M's GGUF file, instead of SmolLM2")
    options.add_argument("--only", type=listed, default=PARTS, help=f"some of {', '.join(PARTS)}")
    options.add_argument("--bits", type=listed, help="some of 3, 4")
    options.add_argument("--methods", type=listed, default=(*METHODS, "qoq"), help="some of them; all")
    options.add_argument("--again", action="store_true", help="measure even what this code has measured")
    options.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    given = options.parse_args()
    case = gemma(given.gemma) if given.gemma else smollm2(given.smollm2)
    file = given.out or RESULTS / ("quality-gemma3.json" if given.gemma else "quality.json")
    entries = Entries(file, given.only if given.again else ())
    entries.about = about_run("python -m tests.lab.quality")
    laboratory = Laboratory(case, entries)
    if given.gemma:
        given.only = ("closeness",)
        laboratory.of_gemma(given)
    else:
        measure(laboratory, given)
    entries.finish()
    for section in given.only:
        print(section, columns(entries.all(section)), sep="\n")


if __name__ == "__main__":
    main()
