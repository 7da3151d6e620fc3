"""Drift of logits over a long generation with a compressed cache (GEAR Fig. 1b)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.oracle import Oracle
from runtime.backends.decoder import DecoderOptions
from runtime.kv.kinds import KVKind
from tests.bench.caches.extent import DRIFT_PROMPT, ORDER
from tests.bench.caches.full import STEP, FullDecoder, feed, rows
from tests.bench.caches.laboratory import Laboratory
from tests.bench.reporting.results import digest

BINS = 100
"""Means that are kept of the steps' deviations."""
WAYS = ("greedy", "sampled")
"""How the continuation was chosen: the likeliest token, or one drawn by its probability."""


def measure(laboratory: Laboratory, steps: int) -> None:
    """Measure what is missing for one model; one with too short a context is left out.

    Args:
        laboratory: The model.
        steps: Generated tokens.
    """
    case, codes = laboratory.case, laboratory.notebook.codes
    if laboratory.checkpoint.spec.max_context < DRIFT_PROMPT + steps:
        return
    prompt = laboratory.tokens[:DRIFT_PROMPT]
    for way in WAYS:
        identity = {"source": laboratory.source, "prompt": digest(prompt), "steps": steps, "way": way}
        text: list[int] = laboratory.notebook.known(
            "continuation",
            identity,
            codes.reference,
            lambda w=way: {"model": case.name, "way": w, "tokens": _continue(laboratory, prompt, steps, w)},  # type: ignore[misc]
        )["tokens"]
        exact: npt.NDArray[np.float32] | None = None
        for kind in ORDER:
            about = {**identity, "kind": kind, "tokens": digest(text)}

            def run(kind: KVKind = kind, way: str = way, text: list[int] = text) -> dict[str, Any]:
                nonlocal exact
                if exact is None:
                    exact = _exact(laboratory, text)
                laboratory.notebook.tell(f"{case.name}: drift over {steps} {way} tokens, {kind}")
                return {"model": case.name, "way": way, "kind": kind, **_drift(laboratory, kind, text, exact)}

            laboratory.notebook.known("drift", about, codes.reference, run)


def _continue(laboratory: Laboratory, prompt: Sequence[int], steps: int, way: str) -> list[int]:
    """The prompt with what the model in full precision over the fp16 cache adds to it."""
    laboratory.notebook.tell(f"{laboratory.case.name}: a {way} continuation of {steps} tokens")
    decoder = FullDecoder(laboratory.checkpoint, DecoderOptions(context=DRIFT_PROMPT + steps))
    rng = np.random.default_rng(0)
    text = list(prompt)
    logits = feed(decoder, text)
    for _ in range(steps):
        if way == "greedy":
            text.append(int(logits.argmax()))
        else:
            text.append(int((logits + rng.gumbel(size=logits.size)).argmax()))
        logits = feed(decoder, text[-1:], len(text) - 1)
    return text


def _exact(laboratory: Laboratory, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of all positions from the prompt's last on, in float32 without a cache: [steps + 1, V]."""
    logits = Oracle(laboratory.checkpoint).logits(torch.tensor([list(text)]))[0, DRIFT_PROMPT - 1 :]
    return np.asarray(logits.float().numpy())


def _drift(laboratory: Laboratory, kind: KVKind, text: Sequence[int], exact: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Feed the text through one kind of cache, in steps that see at every token what decoding one by one sees.

    Returns:
        JSON object: `deviation`, means over bins of |logits - exact| / |exact| (2-norms); `mean`, `first` and `last`
        tenth of it; `different`, how many steps' likeliest tokens are others; `steps`; `repeats`, the share of the
        continuation's tokens whose last 8 stood together before.
    """
    decoder = FullDecoder(laboratory.checkpoint, DecoderOptions(kv=kind, context=len(text)), laboratory.low_bit())
    logits = np.concatenate([rows(decoder, text[at : at + STEP], at) for at in range(0, len(text), STEP)])
    logits = logits[DRIFT_PROMPT - 1 :]
    apart = np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1)
    different = int((logits.argmax(1) != exact.argmax(1)).sum())
    tenth = max(1, len(apart) // 10)
    return {
        "deviation": [round(float(part.mean()), 6) for part in np.array_split(apart, min(BINS, len(apart)))],
        "mean": round(float(np.mean(apart)), 6),
        "first": round(float(np.mean(apart[:tenth])), 6),
        "last": round(float(np.mean(apart[-tenth:])), 6),
        "different": different,
        "steps": len(apart),
        "repeats": round(_repeats(text), 4),
    }


def _repeats(text: Sequence[int], length: int = 8) -> float:
    """Share of places at which a stretch ends that stood in the text before."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    for end in range(length, len(text) + 1):
        stretch = tuple(text[end - length : end])
        again += stretch in seen
        seen.add(stretch)
    return again / max(1, len(text) - length + 1)
