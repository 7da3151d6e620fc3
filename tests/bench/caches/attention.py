"""Attention alone over long caches of every kind, on the CPU backend: stores the numbers of `tests.bench.kv`."""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.pool import default_threads
from runtime.kv.kinds import KINDS
from tests.bench.caches.extent import ORDER, Extent
from tests.bench.caches.laboratory import Notebook


def measure(notebook: Notebook, extent: Extent) -> None:
    """Measure what is missing; all kinds take turns, so they are measured together or not at all.

    Args:
        notebook: What is known, and where numbers go.
        extent: Kinds, lengths and rounds.
    """
    kinds = names(extent)
    threads = default_threads()
    for tokens in extent.attention_contexts:
        identity = {"tokens": tokens, "kinds": kinds, "threads": threads}

        def run(tokens: int = tokens) -> dict[str, Any]:
            from tests.bench.kv import KV_HEADS, LAYERS, SHARE, D
            from tests.bench.kv import measure as timed

            notebook.tell(f"attention over {tokens} tokens")
            rows = timed(tokens, kinds, threads, extent.rounds)
            shape = {"layers": LAYERS, "kv_heads": KV_HEADS, "share": SHARE, "head_dim": D}
            return {"tokens": tokens, "threads": threads, "shape": shape, "rows": rows}

        notebook.known("attention", identity, notebook.codes.cpu, run)


def names(extent: Extent) -> list[str]:
    """Kinds, and how a draft reads those that have drafts, in the order of tables."""
    return [
        name for kind in ORDER if kind in extent.kinds for name in ([kind] + [f"{kind} draft"] * KINDS[kind].has_draft)
    ]
