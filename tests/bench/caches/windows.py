"""What models save whose layers with a sliding window keep only what it reads, computed from their shapes."""

from __future__ import annotations

from dataclasses import replace

from models.catalogue import CATALOGUE
from models.spec import ModelSpec
from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS, KVKind
from runtime.load.memory import CONVERSATIONS
from tests.bench.reporting.markdown import table

TITLES = ("Gemma 3 1B", "Gemma 3 4B", "Gemma 4 E2B", "gpt-oss 20B")
CONTEXTS = (8192, 32768)
_SHOWN: tuple[KVKind, ...] = ("fp16", "int4")
_ROWS, _MIB = 128, 1 << 20


def section() -> str:
    """The section of the page."""
    specs = {model.title: model.spec for model in CATALOGUE if model.title in TITLES}
    rows = []
    for title in TITLES:
        for context in CONTEXTS:
            cells: list[str] = []
            for kv in _SHOWN:
                whole, kept = _sizes(specs[title], kv, context, 1)
                cells += [f"{whole / _MIB:,.0f}", f"{kept / _MIB:,.0f}", _percent(kept, whole)]
            whole, kept = _sizes(specs[title], "int4", context, CONVERSATIONS)
            rows.append((title, f"{context // 1024}k", *cells, _percent(kept, whole)))
    columns = [f"{kv}, {what}" for kv in _SHOWN for what in ("all tokens", "now", "%")]
    head = ("model", "context", *columns, f"int4, {CONVERSATIONS} chats, %")
    return f"""## Sliding windows

A layer with a sliding window reads the last 512 tokens or so and no others, so it keeps no others: its pages move on
with the conversation. The table has MiB of the whole cache for one conversation, if every layer kept all tokens, and as
it is; in the last column, {CONVERSATIONS} chats share the pages of one context. It is computed from the models' shapes,
with steps of {_ROWS} rows. A window that would save less than a quarter of its layers' pages is treated as none.

{table(head, rows)}

Some of these pages are for going back. Every chat can be cut back by a few tokens, as drafts need, and to where its
latest prompts began, as far as pages are left for that. Further back, tokens are computed again."""


def _sizes(spec: ModelSpec, kv: KVKind, context: int, slots: int) -> tuple[int, int]:
    """Bytes of a cache that keeps all tokens, and of the one there is; the slots share the pages of one context."""
    kind = KINDS[kv]
    sizes = {"context": context, "slots": slots, "max_rows": _ROWS, "pages": kind.max_pages(context)}
    unlimited = replace(spec, windows=tuple(window and context for window in spec.windows))
    return cache_bytes(kind, unlimited, **sizes), cache_bytes(kind, spec, **sizes)


def _percent(kept: int, whole: int) -> str:
    return f"{100 * kept / whole:.0f}"
