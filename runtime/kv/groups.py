"""Groups of layers that keep the same tokens: all of a sequence, or those that a sliding window still reads.

A layer with a window of W tokens never reads a token further back. Its group has fewer pages, which move on with the
sequence (`runtime.kv.pages`). Layers whose windows would hardly save anything stay with those that keep all
tokens, so a model without useful windows has one group. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.spec import HeadShape, ModelSpec
from runtime.kv.kinds import CacheKind, page_bytes, window_token_bytes
from runtime.kv.states import WAITING

SLACK = WAITING
"""Tokens kept before those that a step reads: it may be one of many drafts, before whose first the slot is cut back."""
_CLEARLY_LESS = 0.75
"""A window has a group of its own if its pages are at most this share of those for all tokens."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same tokens."""

    layers: tuple[int, ...]
    """The layers, in their order."""
    window: int | None
    """Tokens that a row sees at most, its own included; None: all tokens are kept."""
    pages: int
    """Pages that the slots share."""


def page_groups(
    kind: CacheKind, spec: ModelSpec, *, context: int, slots: int, max_rows: int, pages: int | None = None
) -> tuple[PageGroup, ...]:
    """The groups of a model's layers: first those that keep all tokens, if there are any.

    Args:
        kind: The kind of cache.
        spec: The model.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
        pages: Pages that the slots share where all tokens are kept; None = enough for every slot.
    """
    most = kind.max_pages(context)
    total = slots * most if pages is None else pages
    contexts = max(1, total // max(1, most))
    by_window, windowed = _by_window(spec), []
    for window in [own for own in by_window if own is not None]:
        live, kept = live_pages(kind, window, max_rows), _touched(kind, window - 1)
        count = slots * live + contexts * kept  # each slot's own, and another window of each context's for snapshots
        if count <= _CLEARLY_LESS * total:
            windowed.append(PageGroup(tuple(by_window.pop(window)), window, count))
    rest = tuple(sorted(layer for layers in by_window.values() for layer in layers))
    return (PageGroup(rest, None, total), *windowed) if rest or not windowed else tuple(windowed)


def live_pages(kind: CacheKind, window: int, max_rows: int) -> int:
    """Most pages of a slot that hold what a step reads and writes, and `SLACK` tokens before.

    Args:
        kind: The kind of cache.
        window: Tokens that a row sees at most.
        max_rows: Most rows of the step.
    """
    return _touched(kind, SLACK + window - 1 + (0 if kind.windowed else max_rows))


def layers_alike(spec: ModelSpec, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Some layers that have a cache, those with heads of one shape together."""
    found: dict[HeadShape, list[int]] = {}
    for layer in layers:
        found.setdefault(spec.heads_of(layer), []).append(layer)
    return tuple(map(tuple, found.values())) or ((),)


def cache_bytes(
    kind: CacheKind, spec: ModelSpec, *, context: int, slots: int, max_rows: int, pages: int | None = None
) -> int:
    """Bytes of all buffers of a cache: all pages and every slot's window. States are counted by `runtime.kv.states`.

    Args:
        kind: The kind of cache.
        spec: The model.
        context: Tokens of a slot.
        slots: Number of sequences in the cache.
        max_rows: Most rows of a step.
        pages: As in `page_groups`.
    """
    groups = page_groups(kind, spec, context=context, slots=slots, max_rows=max_rows, pages=pages)
    windows = slots * kind.window_capacity(max_rows) * window_token_bytes(kind, spec)
    return windows + sum(group.pages * page_bytes(kind, spec, group.layers) for group in groups)


def bytes_of_token(kind: CacheKind, spec: ModelSpec, *, context: int, max_rows: int) -> float:
    """Bytes of pages for each token of one sequence that fills a context; without pages, of a page's token.

    Args:
        kind: The kind of cache.
        spec: The model.
        context: Tokens of the sequence.
        max_rows: Most rows of a step.
    """
    tokens = kind.max_pages(context) * kind.page
    if not tokens:
        return page_bytes(kind, spec) / kind.page
    groups = page_groups(kind, spec, context=context, slots=1, max_rows=max_rows)
    return sum(group.pages * page_bytes(kind, spec, group.layers) for group in groups) / tokens


def _by_window(spec: ModelSpec) -> dict[int | None, list[int]]:
    """The layers with a cache, by how far back a block reads in it, its own or one that shares it; None: all of it."""
    furthest: dict[int, int | None] = dict.fromkeys(spec.attention_layers, 0)
    for layer in range(spec.num_layers):
        if spec.mixer(layer) in ("attention", "shared", "both"):
            owner, window = spec.cache_of(layer), spec.windows[layer]
            before = furthest[owner]
            furthest[owner] = None if window is None or before is None else max(window, before)
    found: dict[int | None, list[int]] = {}
    for layer, window in furthest.items():
        found.setdefault(window, []).append(layer)
    return found


def _touched(kind: CacheKind, tokens: int) -> int:
    """Most pages that hold any of so many adjacent tokens."""
    return (max(1, tokens) + kind.page - 2) // kind.page + 1
