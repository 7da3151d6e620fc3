"""Bit-exact outputs of every backend, recorded before a refactoring and compared after it.

    python -m tests.lab.recorded --out before.json
    python -m tests.lab.recorded --against before.json [--backends cpu] [--only gear4] [--stored FOLDER]

Runs the bundled model, a stored one on request, and small random ones of other shapes, on each backend with every
kind of KV cache and way of compensation: a prompt in chunks, greedy decoding across the ends of pages, a cut back into
a page, a draft, a check of several rows. Of every step it keeps a digest of the logits and the tokens they lead to.
Runs of the same code on the same machine and instruction set agree exactly; the number of threads is fixed. The Triton
kernels are interpreted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import assets
from models.store import StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.kv.kinds import KINDS, KVKind
from runtime.load.plan import open_decoder
from tests.runtime.backends.triton import interpreter
from tests.runtime.conftest import make_model, make_spec

BACKENDS = ("cpu", "reference", "triton")
_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    backend: str
    """`cpu`, `reference` or `triton`."""
    model: str = "demo"
    """`demo`, a name of `SHAPES`, or the folder of a stored model."""
    kv: KVKind = "fp16"
    """Kind of cache."""
    prompt: int = 40
    """Tokens of the prompt."""
    rows: int = 128
    """Most rows of a step."""
    decoded: int = 8
    """Tokens that are decoded."""
    more: dict[str, Any] = field(default_factory=dict)
    """Other options of the decoder."""

    @property
    def name(self) -> str:
        """What it is called in a record."""
        more = "".join(f" {key} {value}" for key, value in self.more.items())
        return f"{self.backend} {Path(self.model).name} {self.kv} {self.prompt}+{self.decoded}{more}"


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "3bit": ({"bits": 3, "residual_bits": 4}, {}),
    "codebook3": ({"bits": 3, "codebook": True, "residual_bits": 2}, {"qkv_bias": True}),
    "codebook4": ({"bits": 4, "codebook": True, "residual_bits": 16}, {"mlp_bias": True, "o_bias": True}),
    "windows": ({"bits": 4, "group_size": 64}, {"qk_norm": True, "windows": (9, None), "head_dim": 20}),
}
"""Arguments of a random model, and of its shape."""
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
SMALL_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small3bit": ({"bits": 3, "residual_bits": 4}, SMALL),
    "smallcodebook": ({"bits": 4, "residual_bits": 4, "codebook": True}, {**SMALL, "qkv_bias": True}),
}
"""Small enough for Triton's interpreter."""


def cases(stored: str | None = None) -> Iterator[Case]:
    """All runs, with those of a stored model if there is one."""
    for kv in KINDS if stored else ():
        yield Case(backend="cpu", model=stored, kv=kv, prompt=300, decoded=60)
        yield Case(backend="cpu", model=stored, kv=kv, prompt=150, decoded=20, more={"k_chunk": 64})
    for kv in KINDS:
        yield Case(backend="cpu", kv=kv, prompt=300, decoded=100)
        yield Case(backend="cpu", kv=kv, prompt=150, rows=16, decoded=6, more={"k_chunk": 16})
        yield Case(backend="reference", kv=kv, prompt=270, decoded=4)
        yield Case(backend="triton", kv=kv, model="small3bit", prompt=5, rows=4, decoded=2, more={"k_chunk": 256})
    for k_chunk in (16, 64):
        for select in ("approx", "exact", "static", "random"):
            yield Case(backend="cpu", more={"k_chunk": k_chunk, "select": select, "measure_recall": k_chunk == 64})
        yield Case(backend="reference", more={"k_chunk": k_chunk}, decoded=4)
    for model in SHAPES:
        for kv in ("fp16", "int4", "gear2"):
            yield Case(backend="cpu", model=model, kv=kv, prompt=90, rows=33, decoded=30, more={"k_chunk": 200})
        yield Case(backend="cpu", model=model, decoded=10, more={"threads": 3})
        yield Case(backend="reference", model=model, decoded=4, more={"k_chunk": 200})
    for select in ("approx", "exact", "static", "random"):
        yield Case(
            backend="triton",
            model="smallcodebook",
            prompt=5,
            rows=4,
            decoded=2,
            more={"k_chunk": 128, "select": select},
        )


def stored_model(name: str) -> Any:
    """The bundled model, a stored one, or a random one."""
    if Path(name).is_dir():
        return StoredModel.open_folder(Path(name), Path(name).name)
    if name == "demo":
        return StoredModel.open_folder(assets.demo_path(), "demo")
    arguments, shape = (SHAPES | SMALL_SHAPES)[name]
    return make_model(make_spec(**shape), **arguments)


def opened(case: Case) -> Decoder:
    """A decoder of the case's backend."""
    model = stored_model(case.model)
    context = min(model.spec.max_context, case.prompt + case.decoded + 24)
    chosen = {"threads": 2, "seed": 3, **case.more}
    options = DecoderOptions(kv=case.kv, context=context, max_rows=case.rows, **chosen)
    if case.backend != "triton":
        return open_decoder(model, options, case.backend)[0]
    from runtime.backends.triton.decoder import TritonDecoder  # without a GPU `open_decoder` does not give it

    return TritonDecoder(model, options, torch.device("cpu"))


class Run:
    """Steps of one decoder, and what is kept of them."""

    def __init__(self, case: Case) -> None:
        self.decoder = opened(case)
        self.case = case
        self.digests: list[str] = []
        self.tokens: list[int] = []

    def step(self, tokens: list[int], position: int, **how: Any) -> int:
        """Run rows of slot 0, and note the logits of the last two. Returns the likeliest next token."""
        last = range(max(0, len(tokens) - 2), len(tokens))
        logits = self.decoder.forward(Step.of(tokens, position, last, **how))
        self.digests.append(hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:_DIGITS])
        self.tokens.append(int(logits[-1].argmax()))
        return self.tokens[-1]

    def all(self) -> dict[str, Any]:
        """Prompt, decoding, a cut back, a check of several rows and a draft."""
        case, rng = self.case, np.random.default_rng(len(self.case.kv) + self.case.prompt)
        prompt = rng.integers(3, self.decoder.spec.vocab_size, case.prompt).tolist()
        with self.decoder.session():
            token = 0
            for start in range(0, case.prompt, case.rows):
                token = self.step(prompt[start : start + case.rows], start, compensate=start > 0)
            for position in range(case.prompt, case.prompt + case.decoded):
                token = self.step([token], position)
            back = case.prompt // 2
            token = self.step([token], back)
            token = self.step([token, 5, 6, 7], back + 1)
            self.step([token], back + 5, draft=KINDS[case.kv].has_draft)
        self.decoder.close()
        return {"tokens": self.tokens, "steps": self.digests, "recall": self.decoder.recall}


def record(chosen: list[Case]) -> dict[str, Any]:
    """Run cases, one line each."""
    found = {}
    for case in chosen:
        begin = time.perf_counter()
        found[case.name] = Run(case).all()
        print(f"{case.name:60}{found[case.name]['steps'][-1]:>20}{time.perf_counter() - begin:8.1f} s", flush=True)
    return found


def compare(found: dict[str, Any], before: dict[str, Any]) -> int:
    """Say where a record differs from another. Returns the number of cases that do."""
    differing = 0
    for name, new in found.items():
        old = before.get(name)
        if old is None:
            print(f"new        {name}")
        elif old != new:
            differing += 1
            steps = [i for i, pair in enumerate(zip(old["steps"], new["steps"], strict=True)) if pair[0] != pair[1]]
            tokens = [i for i, pair in enumerate(zip(old["tokens"], new["tokens"], strict=True)) if pair[0] != pair[1]]
            print(f"differs    {name}: steps {steps[:4]}, tokens {tokens[:4]}, recall {old['recall']} {new['recall']}")
    print(f"{len(found) - differing} of {len(found)} cases are the same to the last bit")
    return differing


def main() -> None:
    """Record, or compare with a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--against", type=Path, help="compare with this record; exits 1 where something differs")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="which, with commas between")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--stored", help="folder of a stored model, to run it too")
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    chosen = [case for case in cases(arguments.stored) if case.backend in backends and arguments.only in case.name]
    torch.set_num_threads(1)
    with interpreter.patched_once() if "triton" in backends else nullcontext():
        found = record(chosen)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.against:
        sys.exit(1 if compare(found, json.loads(arguments.against.read_text(encoding="utf-8"))) else 0)


if __name__ == "__main__":
    main()
