"""Drafts by a block of the model that predicts further tokens (`models.mtp`).

Its cache has a row for each verified token but a slot's first ones: made of the token, and of what the model left for
the token before. Rows wait until the next draft, or until there are many, so that they enter the cache in few steps.
Drafted rows, made of what the block itself left, come after them, and are overwritten by the rows of verified tokens.

Source: DeepSeek-V3 (arXiv 2412.19437), §2.2; the rows of a draft as in vLLM's MTP models.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.backends.decoder import Decoder, Float32Array
from runtime.engine.conversations import common_prefix
from runtime.engine.work import Rows, Work

AT_ONCE, IN_PAUSES = 64, 32
"""Rows that wait at most while nothing is drafted, and how many of a pause's last tokens are followed: all that costs
time, for a block that was not right."""


@dataclass(slots=True)
class _Followed:
    """The rows of one slot."""

    first: int = 0
    """Position of the first row's token in the slot; the row's own position is 0."""
    tokens: list[int] = field(default_factory=list)
    """Of all rows."""
    waiting: list[Float32Array] = field(default_factory=list)
    """What the model left [C], for the last of these rows, which are not in the cache yet."""
    left: Float32Array | None = None
    """What it left [C] for the token before the next row; None: unknown."""

    def add(self, token: int) -> None:
        """Add a row. What the model left is unknown where the conversation was cut back; then it is nothing."""
        assert self.left is not None
        self.tokens.append(token)
        self.waiting.append(self.left)
        self.left = None


class MtpDrafts:
    """The drafts of all slots of a model."""

    def __init__(self, block: Decoder) -> None:
        self._block = block
        self._slots = [_Followed() for _ in range(block.options.slots)]

    def begin(self, slot: int, held: Sequence[int]) -> None:
        """Keep the rows of the tokens that a slot holds now; none where they are of other tokens."""
        own = self._slots[slot]
        before = own.first + len(own.tokens)
        kept = common_prefix(own.tokens, held[own.first :])
        if own.first + kept < len(held):
            own = self._slots[slot] = _Followed()
        elif len(held) < before:
            cached = len(own.tokens) - len(own.waiting)
            del own.tokens[kept:]
            del own.waiting[max(0, kept - cached) :]
            own.left = np.zeros(self._block.spec.hidden_size, np.float32)

    def follow(self, slot: int, start: int, tokens: Sequence[int], left: Float32Array) -> None:
        """Take in verified tokens.

        Args:
            slot: Their slot.
            start: Position of the first.
            tokens: Those that a step ran, as far as they were accepted.
            left: float32 [M, C], what it left for them and maybe for others behind them.
        """
        own = self._slots[slot]
        at = own.first + len(own.tokens)
        if start == at and own.left is not None:
            own.add(tokens[0])
        elif start + 1 != at or not own.tokens:  # else its row is there, as the first of a draft
            own = self._slots[slot] = _Followed(first=start + 1)
        for token, row in zip(tokens[1:], left, strict=False):
            own.left = row
            own.add(token)
        own.left = left[len(tokens) - 1]

    def catch_up(self, slot: int, most: int = AT_ONCE) -> Work[None]:
        """Run waiting rows until at most so many are left."""
        own = self._slots[slot]
        while len(own.waiting) > most:
            yield self._rows(slot, min(len(own.waiting), self._block.options.max_rows), wanted=0)

    def draft(self, slot: int, token: int, gamma: int, ends: Collection[int]) -> Work[list[int]]:
        """The most likely tokens after one that the model has not run yet.

        Args:
            slot: Its slot.
            token: The token.
            gamma: How many to draft, at least one.
            ends: Tokens after which nothing is drafted.

        Returns:
            One to gamma tokens; none where nothing is known of the slot.
        """
        own = self._slots[slot]
        if own.left is None:
            return []
        own.add(token)
        yield from self.catch_up(slot, self._block.options.max_rows)
        logits, left = yield self._rows(slot, len(own.waiting), wanted=1)
        drafted = [int(logits[0].argmax())]
        while len(drafted) < gamma and drafted[-1] not in ends:
            at = len(own.tokens) + len(drafted) - 1
            logits, left = yield Rows(
                slot=slot, start=at, tokens=drafted[-1:], wanted=1, kind="mtp", stream=left[-1:], left=True
            )
            drafted.append(int(logits[0].argmax()))
        return drafted

    def _rows(self, slot: int, count: int, *, wanted: int) -> Rows:
        """The first rows that wait, and wait no longer."""
        own = self._slots[slot]
        start, stream = len(own.tokens) - len(own.waiting), np.stack(own.waiting[:count])
        del own.waiting[:count]
        tokens = own.tokens[start : start + count]
        return Rows(slot=slot, start=start, tokens=tokens, wanted=wanted, kind="mtp", stream=stream, left=True)
