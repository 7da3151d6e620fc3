"""The report's section on speed."""

from __future__ import annotations

from tests.bench.caches.extent import ORDER
from tests.bench.caches.shape_sizes import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS
from tests.bench.caches.speed import LONG_TURN
from tests.bench.caches.view import View
from tests.bench.reporting.markdown import table
from tests.bench.reporting.page import Pictures


def section(view: View, pictures: Pictures) -> str:
    """Decoding beside llama.cpp, and attention alone; empty where neither was timed."""
    return "\n\n".join(part for part in (_decoding(view, pictures), _attention(view, pictures)) if part)


def _decoding(view: View, pictures: Pictures) -> str:
    lengths = sorted(view.speed)
    if not lengths:
        return ""
    some = view.speed[lengths[-1]]
    kinds = list(dict.fromkeys(row["kind"] for tokens in lengths for row in view.speed[tokens]["rows"]))
    rows = []
    for kind in kinds:
        each = [view.speed_row(tokens, kind) for tokens in lengths]
        last = each[-1] or {}
        held = f"{last['kv_bytes_per_token']:,.0f}" if "kv_bytes_per_token" in last else ""
        rows.append((kind, held, *("" if row is None else f"{1 / row['p50']:.1f}" for row in each)))
    pauses = []
    for kind in [kind for kind in ORDER if view.speed_row(lengths[0], kind)]:
        row = view.speed_row(lengths[0], kind) or {}
        times = [f"{1e3 * row[name]:.2f}" for name in ("turn_p50", "turn_mean", "longest")]
        pauses.append((kind, *times))
    peer = (
        f"llama.cpp comes from llama-cpp-python {some['peer']}; its weights are Q4_0, flash attention is on, keys and "
        "values both have the type named. Its cache is filled with short sequences side by side that one sequence then "
        "takes over, so every cell is computed and stored."
        if some["peer"]
        else "llama.cpp was not timed: no interpreter with llama-cpp-python and gguf (`--peer-python`)."
    )
    head = ("cache", "bytes per token", *(f"{n // 1024}k{view.mark(view.speed[n])}" for n in lengths))
    slow = ("cache", "median ms", "mean ms", "longest ms")
    return f"""## Decode speed

Decoded tokens per second by tokens in the cache: medians of {some["rounds"]} turns of {some["steps"]} tokens, all
kinds and both programs in turns, {some["threads"]} threads each. The model has random 4-bit weights that are small
beside a long cache: hidden {HIDDEN}, {LAYERS} layers, {HEADS} heads, {KV_HEADS} key-value heads, D = {HEAD_DIM}, MLP
{INTERMEDIATE} ({some["weight_bytes"] / 1e6:.1f} MB of weights). **The contexts are synthetic**: 512 tokens are
prefilled, and separate copies of their pages fill the rest, as `lowbit-chat bench MODEL --kv KIND --at TOKENS` does
too. {peer}

{pictures("speed")}

{table(head, rows)}

{view.origin("speed")}

Kinds whose groups span tokens compress a page every 128 tokens, in one step. A turn of {LONG_TURN} tokens at
{lengths[0]:,} tokens contains two such steps:

{table(slow, pauses)}"""


def _attention(view: View, pictures: Pictures) -> str:
    lengths = sorted(view.attention)
    if not lengths:
        return ""
    some = view.attention[lengths[-1]]
    shape = some["shape"]
    rows = []
    for row in some["rows"]:
        cells = [f"{row['bytes_per_token']:,.0f}"]
        for tokens in lengths:
            one, base = view.attention_row(tokens, row["kind"]), view.attention_row(tokens, "fp16")
            shown = one is not None and base is not None
            cells += [f"{1e3 * one['p50']:.2f}", f"{one['p50'] / base['p50']:.2f}"] if shown else ["", ""]  # type: ignore[index]
        rows.append((row["kind"], *cells))
    head = ["cache", "bytes per token"]
    for tokens in lengths:
        head += [f"{tokens // 1024}k, ms{view.mark(view.attention[tokens])}", "× fp16"]
    return f"""## Attention alone

One new token over a long cache: {shape["layers"]} layers of {shape["kv_heads"]} key-value heads with {shape["share"]}
query heads each, D = {shape["head_dim"]}, {some["threads"]} threads
(`python -m tests.bench.caches --only attention`). Medians, kinds in turns. "Draft" reads only the upper plane.

{pictures("attention")}

{table(head, rows)}

{view.origin("attention")}"""
