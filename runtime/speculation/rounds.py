"""Rounds of speculation in a slot: draft, verify, accept, roll back.

A round begins with a token that is not in the cache yet, at the length of the sequence. Drafted tokens write keys and
values of their own behind it; verification begins at the same position and writes them again, as the target has them.
What of these rows is not accepted is cut off before the next round.

Pages are cut off the window by a round's first step alone. A round is kept so short that decoding one by one would not
have cut one in its middle either (`KVCache.rows_alike`), so each row sees what the target alone sees there.

Source: QuantSpec §4.1 and 4.3, Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from runtime.decoder import Decoder, DrawsTokens, Float32Array, Step
from runtime.kv.conversations import Conversations
from runtime.sampling import Drawn, Sampler
from runtime.speculation.acceptance import Proposal, accept
from runtime.speculation.counts import Counts
from runtime.speculation.gamma import Gamma


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where rounds take place."""

    decoder: Decoder
    """The model."""
    conversations: Conversations
    """What its slots hold."""
    slot: int
    """The slot; it holds the prompt."""


class Rounds:
    """Decodes a slot by rounds of speculation, plain steps among them.

    Args:
        place: Where.
        sampler: Draws the tokens.
        gamma: How many to draft.
        ends: Tokens behind which nothing is drafted.
        check: Called before each step; raises where the work is to end.
    """

    def __init__(
        self, place: Place, sampler: Sampler, gamma: Gamma, *, ends: Collection[int], check: Callable[[], None]
    ) -> None:
        self._place, self._sampler, self._gamma = place, sampler, gamma
        self._ends, self._check = ends, check
        # A grammar decides on the host.
        draws = isinstance(place.decoder, DrawsTokens) and not sampler.constrained
        self._device = cast("DrawsTokens", place.decoder) if draws else None
        self.counts = Counts()
        """What was done so far."""

    def tokens(self, logits: Float32Array, remaining: Callable[[], int]) -> Iterator[tuple[int, Float32Array | Drawn]]:
        """Tokens without end, each with the target's logits [V] that it was drawn from, or what is known of them.

        The slot's tokens always are those before the one that was given last, however many were verified. Logits are
        overwritten when the next token is asked for.

        Args:
            logits: float32 [V], the target's after the prompt.
            remaining: How many tokens are wanted still, the one asked for included.
        """
        token = self._sampler.draw(logits)
        yield token, logits
        held = self._place.conversations.tokens(self._place.slot)
        while True:
            self._check()
            for row, (given, own) in enumerate(self._round(token, self._length(remaining()))):
                if row:
                    held.append(token)
                token = given
                yield token, own

    def _length(self, remaining: int) -> int:
        """Tokens that the next round drafts: no more than are wanted, and than are verified as if one by one."""
        gamma, slot = self._gamma.next(), self._place.slot
        if not gamma:
            return 0
        decoder, conversations = self._place.decoder, self._place.conversations
        conversations.cut(slot, len(conversations.tokens(slot)))
        alike = gamma + 1 if decoder.cache is None else decoder.cache.rows_alike(slot)
        return max(0, min(gamma, remaining - 1, alike - 1, decoder.options.max_rows - 1))

    def _round(self, token: int, gamma: int) -> Sequence[tuple[int, Float32Array | Drawn]]:
        """One round after a token, which is in the cache afterwards. Returns the tokens that it gives."""
        if not gamma:
            return [self._plain(token)]
        held = self._place.conversations.tokens(self._place.slot)
        start = len(held)
        self._place.conversations.make_room(self._place.slot, start + gamma + 1)
        began = time.perf_counter()
        proposal = self._draft(token, start, gamma)
        logits = self._forward([token, *proposal.tokens], start, flush=not proposal.tokens)
        tokens = accept(proposal, logits, self._sampler)
        drafted, accepted = len(proposal.tokens), len(tokens) - 1
        self._gamma.note(drafted, accepted, time.perf_counter() - began)
        self.counts.add(drafted, accepted)
        held.append(token)
        for each in tokens:
            self._sampler.note(each)
        return list(zip(tokens, logits, strict=False))

    def _plain(self, token: int) -> tuple[int, Float32Array | Drawn]:
        """A round without a draft. Where nobody asked for speculation all are such, so it does no more than it must."""
        held = self._place.conversations.tokens(self._place.slot)
        start = len(held)
        self._place.conversations.make_room(self._place.slot, start + 1)
        began = time.perf_counter()
        if self._device is None:
            logits = self._forward([token], start, flush=True)[0]
        else:
            (drawn,) = self._device.draw(self._step([token], start, flush=True), [self._sampler.order()])
        self._gamma.note(0, 0, time.perf_counter() - began)
        self.counts.add(0, 0)
        held.append(token)
        if self._device is None:
            return self._sampler.draw(logits), logits
        self._sampler.note(drawn.token)
        return drawn.token, drawn

    def _draft(self, token: int, start: int, gamma: int) -> Proposal:
        """Up to gamma tokens after one at position `start`."""
        tokens: list[int] = []
        drawn_from = []
        for i in range(gamma):
            logits = self._forward([tokens[-1] if tokens else token], start + i, draft=True, flush=i == 0)
            drawn_from.append(self._sampler.distribution(logits[0], tokens))
            tokens.append(self._sampler.pick(drawn_from[-1]))
            self._check()
            if tokens[-1] in self._ends:
                break
        return Proposal(tokens=tokens, drawn_from=drawn_from)

    def _forward(self, tokens: list[int], start: int, *, draft: bool = False, flush: bool) -> Float32Array:
        """Run a step of the slot from a position on. Returns all rows' logits [M, V]."""
        return self._place.decoder.forward(self._step(tokens, start, draft=draft, flush=flush))

    def _step(self, tokens: list[int], start: int, *, draft: bool = False, flush: bool) -> Step:
        """A step of the slot from a position on, with all rows' logits."""
        M = len(tokens)
        return Step(
            tokens=np.array(tokens, np.int32),
            slots=np.full(M, self._place.slot, np.int32),
            positions=np.arange(start, start + M, dtype=np.int32),
            logit_rows=np.arange(M, dtype=np.int32),
            draft=draft,
            flush=flush,
        )
