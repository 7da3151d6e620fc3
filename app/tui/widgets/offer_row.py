"""The best measured offer on this device, with a button that applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Button

from app.settings import UNSET, Settings
from app.tui.plain import Plain
from runtime.kv.kinds import SPECULATIVE_KV

if TYPE_CHECKING:
    from runtime.wire.device import Offer

NONE = "none measured yet: `lowbit-chat tune-device MODEL` measures drafts and residuals on this device"
OVERRIDDEN = "overridden by k_chunk; set that to auto to see the best offer within the budget"
TAKEN = "in use: "


class OfferRow(Horizontal):
    """`offer  within 0.3 % of full precision at 0.9 x the low-bit speed (...)  [Use it]`."""

    def __init__(self) -> None:
        super().__init__(id="offer-row", classes="setting-line")
        self.changes: Mapping[str, str] = {}
        """Settings that apply the offer, by key, as a user would type them; empty if there is none."""
        self._offer: Offer | None = None

    def compose(self) -> ComposeResult:
        """Name, words, button."""
        yield Plain("offer", classes="setting-name")
        yield Plain(NONE, id="offer-words")
        yield Button("Use it", id="offer-take", compact=True)

    def show(self, offer: Offer | None, settings: Settings) -> None:
        """Show the offer, and whether it is applied.

        Args:
            offer: the best within the budget; None if none is known, or if a fixed k_chunk overrides it, in which
                case the previous one stays.
            settings: the user's settings.
        """
        if settings.k_chunk is not None:
            offer = offer or self._offer
        self._offer = offer
        self.changes = {} if offer is None else changes(offer)
        taken = bool(self.changes) and all(_typed(settings, key) == value for key, value in self.changes.items())
        none = NONE if settings.k_chunk is None else OVERRIDDEN
        words = none if offer is None else f"{TAKEN if taken else ''}{offer.words}"
        self.query_one("#offer-words", Plain).update(words)
        self.query_one(Button).disabled = offer is None or taken


def changes(offer: Offer) -> dict[str, str]:
    """The settings with which a load applies an offer, by key, as a user would type them."""
    drafts = {"kv": SPECULATIVE_KV, "speculate": "auto"} if offer.gamma else {}
    return {"k_chunk": UNSET, **drafts}


def _typed(settings: Settings, key: str) -> str:
    value = settings.get(key)
    return UNSET if value is None else str(value)
