"""The README's table of caches, written between its markers from the same results as docs/kv.md."""

from __future__ import annotations

from pathlib import Path

from runtime.kv.kinds import KVKind
from tests.bench.caches.extent import REAL, window
from tests.bench.caches.judge import LONG, percent
from tests.bench.caches.perplexity import LOW, REAL_BACKEND
from tests.bench.caches.size import LENGTHS
from tests.bench.caches.speed import PEER_TYPES
from tests.bench.caches.view import View
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import between, table

KINDS_SHOWN: tuple[KVKind, ...] = ("fp16", "int8", "hierarchical", "int4", "gear4", "gear2", "kivi2")
_HEAD_DIM = 64
"""Of SmolLM2."""


def write(view: View, file: Path) -> None:
    """Put the table between the markers of a file."""
    file.write_text(between(file.read_text(encoding="utf-8"), "kv", text(view)), encoding="utf-8")


def text(view: View) -> str:
    """The table: bytes, losses of SmolLM2, speeds."""
    shown = [case for case in view.models if case.name in REAL]
    names = [f"{case.evaluated.split(' ')[0]}, {window(case.name, 0)[0]:,}" for case in shown]
    head = ("", "bytes, % of fp16", *names, f"attention at {LONG // 1024}k, × fp16", "decode there, tokens/s")
    rows = []
    for kind in KINDS_SHOWN:
        size = view.size.get((kind, _HEAD_DIM), {}).get(f"reference {LENGTHS[-1]}")
        attention, base = view.attention_row(LONG, kind), view.attention_row(LONG, "fp16")
        share = f"{attention['p50'] / base['p50']:.2f}" if attention and base else ""
        bytes_shown = "" if size is None else f"{size:.0f}"
        rows.append((kind, bytes_shown, *(_cost(view, case.name, kind) for case in shown), share, _speed(view, kind)))
    peers = {peer: _speed(view, peer) for peer in (f"llama.cpp {kind}" for kind in PEER_TYPES)}
    rows += [(peer, "", *("" for _ in shown), "", speed) for peer, speed in peers.items() if speed]
    return table(head, rows)


def _cost(view: View, model: str, kind: str) -> str:
    """What a kind costs over fp16; fp16's own perplexity."""
    entry, base = (view.loss(model, LOW, REAL_BACKEND, name) for name in (kind, "fp16"))
    if entry is None or base is None:
        return ""
    return f"{entry['perplexity']:.2f}" if kind == "fp16" else percent(difference(entry, base))


def _speed(view: View, kind: str) -> str:
    row = view.speed_row(LONG, kind)
    return "" if row is None else f"{1 / row['p50']:.0f}"
