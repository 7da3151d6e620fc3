"""The report's section on speed."""

from __future__ import annotations

from tests.bench.caches.extent import ORDER
from tests.bench.caches.shape_sizes import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS
from tests.bench.caches.speed import LONG_TURN
from tests.bench.caches.view import View
from tests.bench.reporting.markdown import table


def section(view: View, pictures: dict[str, str]) -> str:
    """Decoding beside llama.cpp, and attention alone; empty where neither was timed."""
    return "\n\n".join(part for part in (_decoding(view, pictures), _attention(view, pictures)) if part)


def _decoding(view: View, pictures: dict[str, str]) -> str:
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
        f"llama.cpp is that of llama-cpp-python {some['peer']}, its weights Q4_0, flash attention on, keys and values "
        "both of the type that is named. Its cache is filled as short sequences side by side that one sequence then "
        "takes over: every cell is computed and stored."
        if some["peer"]
        else "llama.cpp was not timed: no interpreter with llama-cpp-python and gguf (`--peer-python`)."
    )
    head = ("cache", "bytes a token", *(f"{tokens // 1024}k" for tokens in lengths))
    slow = ("cache", "median ms", "mean ms", "longest ms")
    return f"""## Decode speed

Decoded tokens a second by tokens in the cache, medians of {some["rounds"]} turns of {some["steps"]} tokens; all kinds
and both programs take turns, {some["threads"]} threads each. Random weights of 4 bits in a shape whose weights are
small beside a long cache: hidden {HIDDEN}, {LAYERS} layers, {HEADS} heads, {KV_HEADS} key-value heads, D =
{HEAD_DIM}, MLP {INTERMEDIATE} ({some["weight_bytes"] / 1e6:.1f} MB of weights). **The contexts are synthetic**: 512
tokens are prefilled and copies of their pages, each a page of its own, fill the rest. That is what `lowbit-chat bench
MODEL --kv KIND --at TOKENS` does too. {peer}

{_picture(pictures, "speed", "Decoded tokens a second by tokens in the cache")}

{table(head, rows)}

Kinds with groups of tokens compress a page every 128 tokens, in one step. A turn of {LONG_TURN} tokens at
{lengths[0]:,}, which holds two such steps:

{table(slow, pauses)}"""


def _attention(view: View, pictures: dict[str, str]) -> str:
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
    head = ["cache", "bytes a token"]
    for tokens in lengths:
        head += [f"{tokens // 1024}k, ms", "× fp16"]
    return f"""## Attention alone

One new token over a long cache, {shape["layers"]} layers of {shape["kv_heads"]} key-value heads with {shape["share"]}
query heads each, D = {shape["head_dim"]}, {some["threads"]} threads (`python -m tests.bench.kv`). Medians; kinds take
turns. "Draft" reads the upper plane alone.

{_picture(pictures, "attention", "Time of attention over fp16's, beside the bytes over fp16's")}

{table(head, rows)}"""


def _picture(pictures: dict[str, str], name: str, alternative: str) -> str:
    return f"![{alternative}]({pictures[name]})" if name in pictures else ""
