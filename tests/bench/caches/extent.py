"""Extent of the cache measurements: kinds, models, and sample sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.kv.kinds import KINDS, KVKind
from runtime.text.tokenizer import Tokenizer
from tests.bench.reporting.cases import CASES, DATA, SMOLLM2, Case, smollm2

SECTIONS = ("gear", "corrected", "size", "memory", "drift", "perplexity", "smooth", "attention", "speed")
"""Parts of the report, in the order in which they are measured."""
ORDER: tuple[KVKind, ...] = (
    "fp16",
    "int8",
    "hierarchical",
    "int4",
    "kcvt4",
    "gear-l4",
    "gear4",
    "kivi2",
    "gear-l2",
    "gear2",
)
"""All kinds, in the order of tables."""
LONGEST = 1024
"""Tokens of a window, where the model's context allows."""
TAUGHT = {"english3m": 256}
"""Tokens of the sequences that a model was trained on, where its context is longer: beyond them it falls apart."""
DRIFT_PROMPT, DRIFT_STEPS = 24, 1000
"""Tokens of the prompt, and generated ones (GEAR Fig. 1b)."""
CONTEXTS = (1024, 8192, 32768)
"""Tokens in the cache while decoding is timed."""
ATTENTION_CONTEXTS = (8192, 32768)
"""The same for attention alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    kinds: Sequence[KVKind] = ORDER
    """Kinds of the perplexities and speeds."""
    tokens: int | None = None
    """Most tokens of each text; None for the case's own number."""
    drift_steps: int = DRIFT_STEPS
    """Generated tokens."""
    contexts: Sequence[int] = CONTEXTS
    """Tokens in the cache while decoding is timed."""
    attention_contexts: Sequence[int] = ATTENTION_CONTEXTS
    """The same for attention alone."""
    rounds: int = 15
    """Turns of everything that is timed."""


QUICK = Extent(
    kinds=("fp16", "int8", "int4", "kivi2", "gear2"),
    tokens=700,
    drift_steps=300,
    contexts=(1024,),
    attention_contexts=(2048,),
    rounds=2,
)
"""Enough to see that everything works; the numbers are noisy."""


REAL = {"smollm2": 1024, "smollm2-book": 1024, "smollm2-2k": 2048, "smollm2-4k": 4096, "smollm2-8k": 8192}
"""A real chat model, with tokens of a window: on WikiText-2 in short and long windows, and on another book."""
FIRST = "smollm2"
"""The one of them whose keys and values are looked at, too."""
_LONG: tuple[KVKind, ...] = ("fp16", "int8", "hierarchical", "int4", "gear4", "gear2")
REAL_KINDS: Mapping[str, Sequence[KVKind]] = {"smollm2-2k": _LONG, "smollm2-4k": _LONG, "smollm2-8k": _LONG}
"""Kinds that are measured there; all where nothing is said. Long windows take minutes a kind."""
TOYS = ("english3m", "demo")
"""Small models beside it, for what takes too long on the real one: other backends, long generations, planted keys."""


def real_cases(folder: Path = SMOLLM2) -> list[Case]:
    """The cases of `REAL`.

    Args:
        folder: Checkpoint of SmolLM2-135M-Instruct.
    """

    def book(tokenizer: Tokenizer, count: int) -> list[int]:
        whole = (DATA / "text" / "moby-dick.md").read_text(encoding="utf-8")
        return tokenizer.encode(whole[60000 : 60000 + 16 * count])

    real = replace(smollm2(folder), group_size=128, closer=())
    return [
        replace(real, name="smollm2", tokens=3000),
        replace(
            real,
            name="smollm2-book",
            tokens=3000,
            evaluated="Moby-Dick from its 60,000th character on",
            encode=book,
        ),
        replace(real, name="smollm2-2k", tokens=4100),
        replace(real, name="smollm2-4k", tokens=8200),
        replace(real, name="smollm2-8k", tokens=8192),
    ]


def known_cases(folder: Path = SMOLLM2) -> list[Case]:
    """All models of the report, the real one first."""
    return [*real_cases(folder), *(case for case in CASES if case.name in TOYS)]


def window(model: str, context: int) -> tuple[int, int]:
    """Tokens of a window and from one to the next, for a model of so long a context."""
    length = REAL.get(model) or TAUGHT.get(model.removesuffix("-planted"), min(LONGEST, context))
    return length, length // 2


def cases(names: Sequence[str] | None, folder: Path = SMOLLM2) -> list[Case]:
    """The models that are there, or some of them by name; `folder` has SmolLM2."""
    return [case for case in known_cases(folder) if (names is None or case.name in names) and case.there()]


def paged_share(kind: KVKind, length: int, first: int) -> float:
    """How much of what the scored positions of a window read is quantized, on average.

    Args:
        kind: The kind of cache.
        length: Tokens of the window.
        first: The first token that is scored; the position before it predicts it.
    """
    one = KINDS[kind]
    shares = []
    for position in range(first - 1, length - 1):
        paged = position + 1 if not one.windowed else min(one.stored_pages(position) * one.page, position)
        shares.append(paged / (position + 1))
    return sum(shares) / len(shares)
