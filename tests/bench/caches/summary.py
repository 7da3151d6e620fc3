"""The first sections of docs/kv.md: the numbers most readers want, and how they were measured."""

from __future__ import annotations

from models.checkpoint import Checkpoint
from runtime.kv.kinds import KVKind
from tests.bench.caches.extent import REAL, window
from tests.bench.caches.judge import LONG, percent
from tests.bench.caches.perplexity import LOW, REAL_BACKEND
from tests.bench.caches.size import LENGTHS
from tests.bench.caches.speed import PEER_TYPES
from tests.bench.caches.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import number, table

KINDS_SHOWN: tuple[KVKind, ...] = ("fp16", "int8", "hierarchical", "int4", "gear4", "gear2", "kivi2")
_HEAD_DIM = 64
"""Of SmolLM2."""


def section(view: View) -> str:
    """Bytes, losses of SmolLM2, and speeds; empty where none of its losses were measured."""
    shown = [case for case in view.models if case.name in REAL]
    if not shown:
        return ""
    names = [f"{case.evaluated.split(' ')[0]}, {window(case.name, 0)[0]:,}" for case in shown]
    head = ("", "bytes, % of fp16", *names, f"attention at {LONG // 1024}k, × fp16", "decode there, tokens/s")
    rows = []
    for kind in KINDS_SHOWN:
        size = view.size.get((kind, _HEAD_DIM), {}).get(f"reference {LENGTHS[-1]}")
        attention, base = view.attention_row(LONG, kind), view.attention_row(LONG, "fp16")
        share = f"{attention['p50'] / base['p50']:.2f}" if attention and base else ""
        bytes_shown = "" if size is None else f"{size:.0f}"
        rows.append((kind, bytes_shown, *(cost(view, case.name, kind) for case in shown), share, _speed(view, kind)))
    peers = {peer: _speed(view, peer) for peer in (f"llama.cpp {kind}" for kind in PEER_TYPES)}
    rows += [(peer, "", *("" for _ in shown), "", speed) for peer, speed in peers.items() if speed]
    return f"""## In short

Loss against the 16-bit cache on SmolLM2 by text and length (fp16: its perplexity); speeds of a small shape with random
weights, where the cache is most of what is read.

{table(head, rows)}

{view.origin("perplexity", "size", "attention", "speed")}"""


def cost(view: View, model: str, kind: str) -> str:
    """What a kind costs over fp16, in percent of perplexity; of fp16 its own perplexity."""
    entry, base = (view.loss(model, LOW, REAL_BACKEND, name) for name in (kind, "fp16"))
    if entry is None or base is None:
        return ""
    return f"{entry['perplexity']:.2f}" if kind == "fp16" else percent(difference(entry, base))


def _speed(view: View, kind: str) -> str:
    row = view.speed_row(LONG, kind)
    return "" if row is None else f"{1 / row['p50']:.0f}"


def measured(view: View) -> str:
    """The models, their texts, and how to read the numbers."""
    rows = []
    for case in view.models:
        exact = view.exact(case.name)
        some = exact or next((entry for (model, *_), entry in view.losses.items() if model == case.name), None)
        length = "" if some is None else f"{some['window']} every {some['window'] // 2}"
        heads = _head_dim(view, case)
        full = "" if exact is None else number(exact["perplexity"])
        tokens = "" if some is None else f", {some['tokens']:,} tokens"
        rows.append((case.name, case.about, heads, f"{case.evaluated}{tokens}", length, full))
    models = table(("model", "what", "channels of a head", "measured on", "windows", "without a cache"), rows)
    return f"""## How it was measured

{models}

{view.origin("perplexity")}

Defaults follow SmolLM2, a real chat model, run as users run it: with {LOW} weights, on the CPU backend. The others show
orderings. "A ± B" is a mean difference and its standard error, estimated from consecutive pieces of the same text;
differences within two standard errors count as noise."""


def _head_dim(view: View, case: Case) -> int | str:
    """Channels of a model's head; nothing where neither a measurement nor the model, if it is here, says so."""
    if case.name in view.gear:
        return int(view.gear[case.name]["head_dim"])
    return Checkpoint.open(case.folder).spec.head_dim if case.there() else ""
