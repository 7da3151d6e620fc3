"""The best way to decode that was measured on this device, and a button that takes it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Button, Static

from app.settings import UNSET, Settings
from runtime.drafting import SPECULATIVE_KV

if TYPE_CHECKING:
    from runtime.wire.device import Offer

NONE = "none measured yet: `lowbit-chat tune-device MODEL` measures what drafts and residuals give here"
OVERRIDDEN = "k_chunk decides; with auto there, the best way within the budget is offered"
TAKEN = "taken up: "


class OfferRow(Horizontal):
    """`offer  within 0.3 % of full precision at 0.9 x the low-bit speed (...)  [Take it up]`."""

    def __init__(self) -> None:
        super().__init__(id="offer-row", classes="setting-line")
        self.changes: Mapping[str, str] = {}
        """Settings that take the offer up, by key, as a person types them; nothing where there is none."""
        self._offer: Offer | None = None

    def compose(self) -> ComposeResult:
        """Name, words, button."""
        yield Static("offer", classes="setting-name")
        yield Static(NONE, markup=False, id="offer-words")
        yield Button("Take it up", id="offer-take", compact=True)

    def show(self, offer: Offer | None, settings: Settings) -> None:
        """Say what is offered, and whether it is taken up.

        Args:
            offer: the best within the budget; None where none is known, or where a fixed k_chunk takes its place: the
                one before stays then.
            settings: what a person chose.
        """
        if settings.k_chunk is not None:
            offer = offer or self._offer
        self._offer = offer
        self.changes = {} if offer is None else changes(offer)
        taken = bool(self.changes) and all(_typed(settings, key) == value for key, value in self.changes.items())
        none = NONE if settings.k_chunk is None else OVERRIDDEN
        words = none if offer is None else f"{TAKEN if taken else ''}{offer.words}"
        self.query_one("#offer-words", Static).update(words)
        self.query_one(Button).disabled = offer is None or taken


def changes(offer: Offer) -> dict[str, str]:
    """The settings with which a load takes an offer up by itself, by key, as a person types them."""
    drafts = {"kv": SPECULATIVE_KV, "speculate": "auto"} if offer.gamma else {}
    return {"k_chunk": UNSET, **drafts}


def _typed(settings: Settings, key: str) -> str:
    value = settings.get(key)
    return UNSET if value is None else str(value)
