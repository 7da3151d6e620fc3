"""The KV cache on the settings screen: the effect of each kind, and the chats' caches saved on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Button

from app.amounts import byte_count
from app.tui.figures import SEPARATOR, token_count
from app.tui.plain import Plain
from runtime.kv.kinds import DEFAULT_KV

if TYPE_CHECKING:
    from runtime.wire.answers import CacheFacts, Holding, Status


class SavedRow(Horizontal):
    """The size of the saved caches, and a button that deletes them."""

    def __init__(self) -> None:
        super().__init__(id="saved-row", classes="setting-line")

    def compose(self) -> ComposeResult:
        """Name, amount, button."""
        yield Plain("saved caches", classes="setting-name")
        yield Plain("", id="saved-amount")
        yield Button("Delete", id="saved-delete", compact=True)

    def show(self, saved: Holding | None) -> None:
        """Show the size; None if the runtime did not report it."""
        words = "not known" if saved is None else "none" if not saved.files else _amount(saved)
        self.query_one("#saved-amount", Plain).update(words)
        self.query_one(Button).disabled = saved is None


def _amount(saved: Holding) -> str:
    chats = "1 chat" if saved.files == 1 else f"{saved.files} chats"
    return f"{byte_count(saved.bytes)} of {chats} on disk"


def cache_effect(caches: Mapping[str, CacheFacts], kv: str, context: int | None, status: Status | None) -> list[str]:
    """The effect of the chosen kind of cache and context, as lines; empty if no model is loaded.

    Args:
        caches: the cost of each kind for the model.
        kv: the chosen kind.
        context: the chosen context in tokens; None for automatic.
        status: the runtime's status.
    """
    chosen, plain = caches.get(kv), caches.get("fp16")
    if chosen is None or plain is None or status is None:
        return []
    share = f" ({100 * chosen.bytes_per_token / plain.bytes_per_token:.0f} % of fp16)" if kv != "fp16" else ""
    fits = f"{token_count(chosen.context)} tokens fit"
    parts = [f"{byte_count(chosen.bytes_per_token)} per token{share}", fits]
    tokens = min(context or status.context or 0, chosen.context)
    if tokens:
        parts.append(f"{byte_count(tokens * chosen.bytes_per_token)} for {token_count(tokens)}")
    lines = [SEPARATOR.join(parts), _advice(caches, kv)]
    if context is not None and context > chosen.context:
        lines.append(
            f"A context of {token_count(context)} exceeds this model or memory; it will be shortened or refused."
        )
    return lines


def _advice(caches: Mapping[str, CacheFacts], kv: str) -> str:
    if kv == DEFAULT_KV:
        return f"Recommended here: {kv}, your current setting."
    return f"Recommended here: {DEFAULT_KV}; it holds {token_count(caches[DEFAULT_KV].context)} tokens."
