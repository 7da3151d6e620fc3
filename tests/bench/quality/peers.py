"""llama.cpp's numbers on the windows of a case, as entries of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.quality import llama
from tests.bench.quality.measure import Laboratory, oracle_code
from tests.bench.reporting.losses import pieces
from tests.bench.reporting.origin import digest_code
from tests.bench.reporting.results import Entry, digest

_HERE = Path(__file__).parent
KINDS = ((llama.FULL, False), *((kind, True) for kind in llama.KINDS))
"""What is measured: float32, and every type with an importance matrix."""


def code() -> str:
    """Digest of the code that decides llama.cpp's numbers: conversion, importance matrix and scoring."""
    files = [_HERE / name for name in ("llama.py", "llama_worker.py", "outliers.py")]
    return digest([digest_code(files), oracle_code()])


def measure(
    laboratory: Laboratory, python: str, version: str, squares: Callable[[], Mapping[str, llama.FloatArray]]
) -> Entry:
    """Measure what is missing for one model.

    Args:
        laboratory: The model.
        python: An interpreter with llama-cpp-python and gguf.
        version: Of llama-cpp-python there.
        squares: Makes the mean squares of the calibration activations.

    Raises:
        PeerError: llama.cpp could not do it.
    """
    return laboratory.known("peers", [KINDS, version], code(), lambda: _rows(laboratory, python, squares()))


def _rows(laboratory: Laboratory, python: str, squares: Mapping[str, llama.FloatArray]) -> dict[str, Any]:
    case, tokens = laboratory.case, laboratory.tokens
    laboratory.tell(f"{case.name}: llama.cpp")
    importance = llama.importance(laboratory.checkpoint.spec, squares)
    text = llama.Text(tokens=tokens, window=case.window, stride=case.stride)
    version, rows = llama.ask(python, laboratory.checkpoint, text, importance, KINDS)
    made = [
        {
            "kind": row.kind,
            "weighted": row.weighted,
            "gpu_bytes": row.gpu_bytes,
            "bits_per_weight": row.bits_per_weight,
            "types": dict(row.types),
            "seconds": row.seconds,
            **_losses(row.nats, text.scored(as_chat=False)),
            "chat": _losses(row.chat_nats, text.scored(as_chat=True)),
        }
        for row in rows
    ]
    return {"version": version, "rows": made}


def _losses(nats: Sequence[float], tokens: int) -> dict[str, Any]:
    """As `tests.bench.reporting.losses.numbers` has it."""
    mean = sum(nats) / tokens
    return {"perplexity": round(math.exp(mean), 5), "nats": round(mean, 6), "tokens": tokens, "pieces": pieces(nats)}
