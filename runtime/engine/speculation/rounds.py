"""Rounds of speculation in a slot: draft, verify, accept, roll back.

A round begins with a token that is not in the cache yet, at the end of the sequence. The draft is copied from the text
if that is expected to pay; otherwise the model drafts, if enabled. Model drafts write keys and values of their own
after that token; verification starts at the same position and overwrites them with the target's. Rejected rows are
truncated before the next round.

For a copied draft, the target samples each token as it would alone, and the draft is accepted as far as it agrees. This
is rejection sampling from a deterministic draft: a token is accepted with the target's probability, and its replacement
follows the target's distribution without it. It consumes the same random numbers as plain decoding, so a seed gives the
same answer with and without copied drafts.

A round is short enough that plain decoding would not have flushed a page in its middle (`KVCache.rows_alike`), so each
row sees exactly what it would see in plain decoding.

Source: QuantSpec §4.1 and 4.3, Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runtime.backends.decoder import Decoder, DrawsTokens, Float32Array
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.rows import RowKind, Rows, Work
from runtime.engine.speculation.acceptance import Proposal, accept
from runtime.engine.speculation.copying import Copies, StepTimes
from runtime.engine.speculation.counts import Counts, Speculation
from runtime.engine.speculation.gamma import Gamma
from runtime.text.sampling import Drawn, Sampler

SHARED_ROWS = 16
"""Most rows of a verification of several sequences together: as many as a CPU unpacks weights for at once. Beyond this,
one sequence's drafts slow down the others."""
Take = Callable[[int, Float32Array | Drawn], bool]
"""Receives a token and the target's logits [V] that it was sampled from (or the decoder's sample, if it samples);
returns whether to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """Context of a decoding loop."""

    decoder: Decoder
    """The model; only its options and cache are used."""
    conversations: Conversations
    """The contents of its slots."""
    slot: int
    """The slot; it holds the prompt when decoding begins."""
    concurrent: Callable[[], int] = lambda: 1
    """Number of running sequences, including this one."""
    clock: Callable[[], float] = time.perf_counter
    """Clock for timing rounds, in seconds."""


class Rounds:
    """Decodes a slot by rounds of speculation and plain steps.

    Args:
        context: The decoder, slot and clock.
        sampler: Samples the tokens.
        gamma: Draft-length policy.
        ends: Tokens after which nothing is drafted.
        alike: Whether gamma must not depend on concurrent sequences, so that samples do not either.
        times: Step durations, for copying drafts from the text; None: no copying.
    """

    def __init__(
        self,
        context: DecodeContext,
        sampler: Sampler,
        gamma: Gamma,
        *,
        ends: Collection[int],
        alike: bool = False,
        times: StepTimes | None = None,
    ) -> None:
        self._context, self._sampler, self._gamma = context, sampler, gamma
        self._ends, self._alike, self._times = ends, alike, times
        self._copies: Copies | None = None
        self._draws = isinstance(context.decoder, DrawsTokens) and not sampler.constrained  # grammars need logits
        self.counts = Counts()
        """Statistics so far."""

    def decode(self, logits: Float32Array, take: Take, remaining: Callable[[], int]) -> Work[None]:
        """Yields the rows to run until no more tokens are wanted.

        After every step, the slot holds exactly the tokens before the last accepted one, however many were verified.

        Args:
            logits: float32 [V], the target's after the prompt.
            take: Called with each token.
            remaining: Returns how many tokens are still wanted.
        """
        token = self._sampler.draw(logits)
        wanted = take(token, logits)
        held = self._context.conversations.tokens(self._context.slot)
        if wanted and self._times is not None and not self._times.short:
            self._copies = Copies([*held, token], self._times, self._ends)
        while wanted:
            for row, (given, own) in enumerate((yield from self._round(token, remaining()))):
                if row:
                    held.append(token)
                token = given
                wanted = take(token, own)
                if not wanted:
                    break

    def result(self) -> Speculation:
        """The statistics, with the draft length of the next round, or the average one if all drafts were copied."""
        counts = self.counts
        return counts.result(self._gamma.current or (round(counts.drafted / counts.rounds) if counts.rounds else 0))

    def _round(self, token: int, remaining: int) -> Work[Sequence[tuple[int, Float32Array | Drawn]]]:
        """Run one round after a token, which enters the cache. Returns the new tokens."""
        held = self._context.conversations.tokens(self._context.slot)
        start, began, alone = len(held), self._context.clock(), self._context.concurrent() == 1
        given: Sequence[tuple[int, Float32Array | Drawn]]
        copied = self._copied(remaining)
        if copied:
            given, drafted = (yield from self._verified(token, start, copied)), len(copied)
        elif gamma := self._fitting(self._gamma.next(), remaining):
            proposal = yield from self._draft(token, start, gamma)
            logits = yield self._rows([token, *proposal.tokens], start)
            tokens, drafted = accept(proposal, logits, self._sampler), len(proposal.tokens)
            given = list(zip(tokens, logits, strict=False))
            for each in tokens:
                self._sampler.note(each)
        else:
            given, drafted = [(yield from self._plain(token, start))], 0
        held.append(token)
        if alone and self._context.concurrent() == 1:  # otherwise it says little about the duration of a round
            seconds = self._context.clock() - began
            if not copied:
                self._gamma.note(drafted, len(given) - 1, seconds)
            if self._times is not None and (copied or not drafted):
                self._times.note(1 + drafted, seconds)
        if self._copies is not None:
            for each, _ in given:
                self._copies.note(each)
        self.counts.add(drafted, len(given) - 1)
        return given

    def _copied(self, remaining: int) -> list[int]:
        """Tokens to copy as the next draft; empty if that is not expected to pay."""
        if self._copies is None or not self._copies.possible:
            return []
        copied = self._copies.draft(min(remaining, self._most_rows()) - 1, self._context.concurrent())
        return copied[: self._fitting(len(copied), remaining)]

    def _fitting(self, gamma: int, remaining: int) -> int:
        """The draft length, limited to the tokens still wanted and to rows that verify as if one by one."""
        if not gamma:
            return 0
        decoder, conversations, slot = self._context.decoder, self._context.conversations, self._context.slot
        conversations.cut(slot, len(conversations.tokens(slot)))
        alike = gamma + 1 if decoder.cache is None else decoder.cache.rows_alike(slot)
        return max(0, min(gamma, remaining - 1, alike - 1, self._most_rows() - 1))

    def _most_rows(self) -> int:
        """Most rows of a verification."""
        concurrent = self._context.concurrent()
        return self._context.decoder.options.max_rows if self._alike or concurrent == 1 else SHARED_ROWS // concurrent

    def _verified(self, token: int, start: int, copied: list[int]) -> Work[list[tuple[int, Float32Array | Drawn]]]:
        """The target's tokens as far as a copied draft agrees, and one more, each with what it was sampled from."""
        logits = yield self._rows([token, *copied], start)
        given: list[tuple[int, Float32Array | Drawn]] = []
        for row, expected in zip(logits, [*copied, None], strict=True):
            drawn = self._sampler.draw(row)
            given.append((drawn, row))
            if drawn != expected or drawn in self._ends:
                break
        return given

    def _plain(self, token: int, start: int) -> Work[tuple[int, Float32Array | Drawn]]:
        """Decode a token without a draft. Returns it with what it was sampled from."""
        if not self._draws:
            logits = yield self._rows([token], start)
            return self._sampler.draw(logits[0]), logits[0]
        order = self._sampler.order()
        drawn: Drawn = yield Rows(
            slot=self._context.slot, start=start, tokens=[token], wanted=1, kind="drawn", draw=order
        )
        self._sampler.note(drawn.token)
        return drawn.token, drawn

    def _draft(self, token: int, start: int, gamma: int) -> Work[Proposal]:
        """Draft up to gamma tokens after the one at position `start`."""
        tokens: list[int] = []
        drawn_from = []
        for i in range(gamma):
            logits = yield self._rows([tokens[-1] if tokens else token], start + i, draft=True)
            drawn_from.append(self._sampler.distribution(logits[0], tokens))
            tokens.append(self._sampler.pick(drawn_from[-1]))
            if tokens[-1] in self._ends:
                break
        return Proposal(tokens=tokens, drawn_from=drawn_from)

    def _rows(self, tokens: list[int], start: int, *, draft: bool = False) -> Rows:
        """Rows of the slot from a position on, computing all their logits."""
        kind: RowKind = "draft" if draft else "decode"
        return Rows(slot=self._context.slot, start=start, tokens=tokens, wanted=len(tokens), kind=kind)
