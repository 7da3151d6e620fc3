"""Attention alone over long caches of every kind, on the CPU backend.

One new token attends to so many cached ones: 22 layers of 4 key-value heads with 8 query heads each and D = 64, as in a
Llama of 1.1 B. The layers' caches are read one after another, so the last-level cache does not hold them where they
outgrow it; seconds are those of all layers. Kinds take turns, so that a busy moment of the machine strikes all.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runtime.backends.cpu.arena import aligned_zeros
from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.control import CONTROL_WORDS
from runtime.backends.cpu.data.sizes import RUN_ROWS
from runtime.backends.cpu.data.step import parameters_of
from runtime.backends.cpu.link import link, most_scratch
from runtime.backends.cpu.pool import Pool, default_threads
from runtime.backends.cpu.tiles import padded
from runtime.backends.decoder import DecoderOptions
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.kv.oracle.page import quantize
from tests.bench.caches.extent import ORDER, Extent
from tests.bench.caches.laboratory import Notebook

LAYERS, KV_HEADS, SHARE, D = 22, 4, 8, 64
KEPT_PAGES = 16


class Attention:
    """Attention of one row over a full cache of one kind, in every layer.

    Args:
        kind: The kind of cache.
        tokens: Cached tokens.
        threads: Threads.
        draft: Whether to read as a draft does.
    """

    def __init__(self, kind: KVKind, tokens: int, threads: int, *, draft: bool = False) -> None:
        layers = {"num_layers": LAYERS, "attention_layers": tuple(range(LAYERS)), "state_layers": ()}
        layers["windows"] = (None,) * LAYERS
        spec: Any = SimpleNamespace(**layers, num_kv_heads=KV_HEADS, head_dim=D)
        self.cache = CpuCache(spec, DecoderOptions(kv=kind, context=tokens + 256, slots=1, max_rows=1), threads)
        self._fill(tokens)
        H = KV_HEADS * SHARE
        self._control = aligned_zeros((CONTROL_WORDS,), np.int64)
        step = parameters_of(self._control)
        self._inputs = aligned_zeros((3, 2), np.int32)
        self._inputs[1, 0], self._inputs[2] = tokens - 1, (0, 1)
        for name, row in zip(("slots", "positions", "run_rows"), self._inputs, strict=True):
            step[name] = row.ctypes.data
        splits = min(self.cache.max_splits, max(1, 2 * threads // KV_HEADS))
        step["rows"], step["runs"], step["splits"], step["draft"] = 1, 1, splits, draft
        step["items"] = KV_HEADS * splits
        self._q = aligned_zeros((H + 2 * KV_HEADS, D), np.float32)
        self._q[:] = np.random.default_rng(1).standard_normal(self._q.shape) * D**-0.5
        self._out = aligned_zeros((splits * H * (D + 16),), np.float32)
        self._program = aligned_zeros((LAYERS, op.WIDTH), np.int64)
        q, out = op.Matrix(int(self._q.ctypes.data), self._q.nbytes), int(self._out.ctypes.data)
        for layer, words in enumerate(self._program):
            stored = self.cache.stored(layer)
            own = op.Attend(q, H, KV_HEADS, D, 0, RUN_ROWS, stored, out, exact=self.cache.exact(layer))
            op.write(words, own)
        link(self._program, threads)
        self._scratch = aligned_zeros((threads, padded(most_scratch(self._program), 64)), np.uint8)
        step["scratch"], step["scratch_stride"] = self._scratch.ctypes.data, self._scratch.strides[0]
        self._pool = Pool(self._control, threads)

    def _fill(self, tokens: int) -> None:
        """Fill pages and window with some random pages over and over."""
        kind, store = self.cache.kind, self.cache.store
        x = torch.randn(KEPT_PAGES, KV_HEADS, kind.page, D, generator=torch.Generator().manual_seed(0))
        some = aligned_zeros((KEPT_PAGES, KV_HEADS, store.layout.record), np.uint8)
        for part in PARTS:
            fields = {name: array.numpy() for name, array in quantize(kind, part, x).items()}
            store.layout.write(some, part, fields)
        for layer in store.records:
            layer[:] = some[np.arange(len(layer)) % KEPT_PAGES]
        # Token by token until it is full: a page is cut off where a step finds the window due.
        store.flush = lambda slot, page, rest: None  # type: ignore[method-assign]
        at = 0
        while at < tokens:
            count = min(64, tokens - at) if kind.windowed else tokens
            rows = np.arange(at, at + count, dtype=np.int32)
            self.cache.begin(np.zeros(count, np.int32), rows)
            at += count

    def run(self) -> float:
        """Seconds of all layers once: of one thread its processor's, which a busy machine hardly changes."""
        clock = time.thread_time if self._pool.threads == 1 else time.perf_counter
        with self._pool.session():
            start = clock()
            self._pool.step(self._program)
            return clock() - start


def timed(tokens: int, kinds: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all kinds in turns. Returns a row for each."""
    cases: dict[str, Attention] = {}
    for name in kinds:
        kind, _, draft = name.partition(" ")
        cases[name] = Attention(kind, tokens, threads, draft=draft == "draft")  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(case.run())
    rows = []
    for name, found in times.items():
        found.sort()
        row = {"kind": name, "tokens": tokens, "threads": threads, "best": found[0], "p50": statistics.median(found)}
        row["bytes_per_token"] = cases[name].cache.store.page_bytes / KINDS[name.split()[0]].page  # type: ignore[index]
        rows.append(row)
    return rows


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
