"""Perplexity over each kind of cache, by the program's own evaluation; windows of `extent.window`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.kv.kinds import KVKind
from runtime.load.open import open_decoder
from runtime.measure.evaluate import full_precision_perplexity, perplexity, windows
from tests.bench.caches.extent import LONGEST, REAL, REAL_KINDS, paged_share, window
from tests.bench.caches.full import FullDecoder
from tests.bench.caches.laboratory import K_CHUNK, Laboratory
from tests.bench.reporting.losses import numbers
from tests.bench.reporting.results import Entry, digest

FULL, LOW = "full", "4-bit"
"""Weights of the checkpoint, and low-bit ones with compensation."""
EXACT = "fp32"
"""In the place of a kind: no cache at all, every window in one pass of float32."""
REAL_BACKEND = "cpu"
"""Where real models are measured, with low-bit weights: as a person runs them. Others would take hours."""
WAYS = ((FULL, "reference"), (LOW, "reference"), (LOW, "cpu"))
"""Weights and backend."""


def measure(laboratory: Laboratory, kinds: Sequence[KVKind], way: tuple[str, str]) -> None:
    """Measure what is missing for one model.

    Args:
        laboratory: The model.
        kinds: Kinds of cache.
        way: One of `WAYS`.
    """
    weights, backend = way
    name = laboratory.case.name
    if weights == FULL and REAL.get(name, 0) <= LONGEST:
        exact(laboratory)
    if name in REAL and backend != REAL_BACKEND:
        return
    for kind in [kind for kind in kinds if kind in REAL_KINDS.get(name, kinds)]:
        what = f"{laboratory.case.name}, {weights} weights, {kind} cache on the {backend} backend"
        laboratory.notebook.attempt(what, lambda k=kind: point(laboratory, weights, backend, k))  # type: ignore[misc]


def point(laboratory: Laboratory, weights: str, backend: str, kind: KVKind, *, smooth: bool = False) -> Entry:
    """One perplexity.

    Args:
        laboratory: The model.
        weights: `FULL` or `LOW`.
        backend: `reference` or `cpu`.
        kind: The cache.
        smooth: Whether low-bit weights were made with SmoothAttention.
    """
    case, codes, notebook = laboratory.case, laboratory.notebook.codes, laboratory.notebook
    length, stride = window(laboratory.case.name, laboratory.checkpoint.spec.max_context)
    about = {"weights": weights, "backend": backend, "kind": kind, "smooth": smooth}
    identity = {**_text(laboratory, length, stride), **about, "k_chunk": K_CHUNK}
    ran = codes.cpu if backend == "cpu" else codes.reference
    code = ran if weights == FULL else digest([ran, codes.making])

    def run() -> dict[str, Any]:
        options = DecoderOptions(kv=kind, context=length, k_chunk=0 if weights == FULL else K_CHUNK)
        decoder: Decoder
        if weights == FULL:
            decoder = FullDecoder(laboratory.checkpoint, options, laboratory.low_bit())
        else:
            decoder, _ = open_decoder(laboratory.low_bit(smooth=smooth), options, backend)
        try:
            result = perplexity(decoder, laboratory.tokens, length, stride)
        finally:
            decoder.close()
        notebook.tell(
            f"{case.name} {weights} {kind} on {backend}{' smooth' if smooth else ''}: {result.perplexity:.4f} "
            f"in {result.seconds:.1f} s"
        )
        share = paged_share(kind, length, length - stride)
        return {"model": case.name, **about, **numbers(result), "quantized": round(share, 4), "window": length}

    return notebook.known("perplexity", identity, code, run)


def exact(laboratory: Laboratory) -> Entry:
    """Full precision without a cache."""
    length, stride = window(laboratory.case.name, laboratory.checkpoint.spec.max_context)
    about = {"weights": FULL, "backend": "oracle", "kind": EXACT, "smooth": False}

    def run() -> dict[str, Any]:
        result = full_precision_perplexity(laboratory.checkpoint, laboratory.tokens, length, stride)
        laboratory.notebook.tell(f"{laboratory.case.name} without a cache: {result.perplexity:.4f}")
        return {"model": laboratory.case.name, **about, **numbers(result), "quantized": 0.0, "window": length}

    identity = {**_text(laboratory, length, stride), **about}
    return laboratory.notebook.known("perplexity", identity, laboratory.notebook.codes.making, run)


def _text(laboratory: Laboratory, length: int, stride: int) -> dict[str, Any]:
    """What decides a loss besides the decoder."""
    cut = [(part.start, part.end, part.first) for part in windows(len(laboratory.tokens), length, stride)]
    return {"source": laboratory.source, "text": digest(laboratory.tokens), "windows": digest(cut)}
