"""The KV cache on the settings screen: what a kind of cache means here, and what is kept of chats on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Button, Static

from app.amounts import byte_count
from app.tui.figures import SEPARATOR, token_count

if TYPE_CHECKING:
    from runtime.wire.answers import CacheFacts, Holding, Status

GOOD_CACHES = ("fp16", "int8", "int4")
"""Kinds that are recommended, the best first: what each of the others does better is none of a person's business."""
USUAL_CONTEXT = 8192
"""Tokens of context that a chat should have."""


class SavedRow(Horizontal):
    """How much is kept of chats on disk, and a button that deletes it."""

    def __init__(self) -> None:
        super().__init__(id="saved-row", classes="setting-line")

    def compose(self) -> ComposeResult:
        """Name, amount, button."""
        yield Static("saved caches", classes="setting-name")
        yield Static("", markup=False, id="saved-amount")
        yield Button("Delete", id="saved-delete", compact=True)

    def show(self, saved: Holding | None) -> None:
        """Say how much there is; None: the runtime did not say."""
        words = "not known" if saved is None else "none" if not saved.files else _amount(saved)
        self.query_one("#saved-amount", Static).update(words)
        self.query_one(Button).disabled = saved is None


def _amount(saved: Holding) -> str:
    chats = "1 chat" if saved.files == 1 else f"{saved.files} chats"
    return f"{byte_count(saved.bytes)} of {chats} on disk"


def cache_effect(caches: Mapping[str, CacheFacts], kv: str, context: int | None, status: Status | None) -> list[str]:
    """What the chosen kind of cache and context mean, in lines; nothing where no model is loaded.

    Args:
        caches: what each kind means for the model.
        kv: the kind that is chosen.
        context: the context that is chosen; None: the program chooses.
        status: what runs.
    """
    chosen, plain = caches.get(kv), caches.get("fp16")
    if chosen is None or plain is None or status is None:
        return []
    share = f" ({100 * chosen.bytes_per_token / plain.bytes_per_token:.0f} % of fp16)" if kv != "fp16" else ""
    fits = f"{token_count(chosen.context)} tokens fit"
    parts = [f"{byte_count(chosen.bytes_per_token)} a token{share}", fits]
    tokens = min(context or status.context or 0, chosen.context)
    if tokens:
        parts.append(f"{byte_count(tokens * chosen.bytes_per_token)} for {token_count(tokens)}")
    lines = [SEPARATOR.join(parts), _advice(caches, kv, context, status)]
    if context is not None and context > chosen.context:
        lines.append(
            f"A context of {token_count(context)} does not fit this model or memory: it will be cut, or refused."
        )
    return lines


def recommended_cache(caches: Mapping[str, CacheFacts], tokens: int) -> str | None:
    """The kind of cache that loses least of those in which so many tokens fit; the smallest good one where none does.

    Args:
        caches: what each kind means for the model; with `fp16`, `int8` and `int4`.
        tokens: a context to have.
    """
    known = [kind for kind in GOOD_CACHES if kind in caches]
    return next((kind for kind in known if caches[kind].context >= tokens), known[-1] if known else None)


def _advice(caches: Mapping[str, CacheFacts], kv: str, context: int | None, status: Status) -> str:
    tokens = context or max(status.context or 0, USUAL_CONTEXT)
    best = recommended_cache(caches, min(tokens, max(facts.context for facts in caches.values())))
    if best is None:
        return ""
    if best == kv:
        return f"Recommended here: {kv}, as you have it."
    why = (
        "nothing is won by a smaller one" if best == "fp16" else f"it holds {token_count(caches[best].context)} tokens"
    )
    return f"Recommended here: {best}; {why}."
