"""Rounds of speculation in a slot: draft, verify, accept, roll back.

A round begins with a token that is not in the cache yet, at the length of the sequence. A draft is copied from the text
where that promises to pay; else the model drafts, where it is to. What the model drafts writes keys and values of its
own behind that token; verification begins at the same position and writes them again, as the target has them. What of
these rows is not accepted is cut off before the next round.

Of a copied draft, the target draws each token as it would alone, and the draft stays as far as it says the same. This
is rejection sampling for a draft that is certain of its tokens: one stays with the target's probability, and what
stands in its place has the target's distribution without it. It takes the random numbers that plain decoding takes, so
a seed gives the same answer with copied drafts and without.

A round is kept so short that decoding one by one would not have cut a page off the window in its middle either
(`KVCache.rows_alike`), so each row sees what the target alone sees there.

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
"""Rows that verifications of several sequences have together, at most: as many as a CPU's products unpack weights for
once. Beyond, drafts of one sequence cost the others time."""
Take = Callable[[int, Float32Array | Drawn], bool]
"""Takes a token and the target's logits [V] that it was drawn from, or what is known of them where the decoder draws;
returns whether another one is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where rounds take place."""

    decoder: Decoder
    """The model; asked for its options and its cache alone."""
    conversations: Conversations
    """What its slots hold."""
    slot: int
    """The slot; it holds the prompt when rounds begin."""
    company: Callable[[], int] = lambda: 1
    """How many sequences are worked on, this one included."""
    clock: Callable[[], float] = time.perf_counter
    """What rounds are timed by, in seconds."""


class Rounds:
    """Decodes a slot by rounds of speculation, plain steps among them.

    Args:
        place: Where.
        sampler: Draws the tokens.
        gamma: How many to draft.
        ends: Tokens behind which nothing is drafted.
        alike: Whether gamma is the same with other sequences beside: where draws must not hang on them.
        times: What steps take, where drafts are to be copied from the text; None: they are not.
    """

    def __init__(
        self,
        place: Place,
        sampler: Sampler,
        gamma: Gamma,
        *,
        ends: Collection[int],
        alike: bool = False,
        times: StepTimes | None = None,
    ) -> None:
        self._place, self._sampler, self._gamma = place, sampler, gamma
        self._ends, self._alike, self._times = ends, alike, times
        self._copies: Copies | None = None
        self._draws = isinstance(place.decoder, DrawsTokens) and not sampler.constrained  # a grammar needs the logits
        self.counts = Counts()
        """What was done so far."""

    def decode(self, logits: Float32Array, take: Take, remaining: Callable[[], int]) -> Work[None]:
        """Tokens, until no more is wanted.

        The slot's tokens always are those before the one that was taken last, however many were verified.

        Args:
            logits: float32 [V], the target's after the prompt.
            take: Given each token.
            remaining: How many tokens are wanted still.
        """
        token = self._sampler.draw(logits)
        wanted = take(token, logits)
        held = self._place.conversations.tokens(self._place.slot)
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
        """What was done, with the tokens that a round drafts next, or drafted on average where all were copied."""
        counts = self.counts
        return counts.result(self._gamma.current or (round(counts.drafted / counts.rounds) if counts.rounds else 0))

    def _round(self, token: int, remaining: int) -> Work[Sequence[tuple[int, Float32Array | Drawn]]]:
        """One round after a token, which is in the cache afterwards. Returns the tokens that it gives."""
        held = self._place.conversations.tokens(self._place.slot)
        start, began, alone = len(held), self._place.clock(), self._place.company() == 1
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
        if alone and self._place.company() == 1:  # else it says little of what a round takes
            seconds = self._place.clock() - began
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
        """The tokens of the next round that are copied; none where that does not pay."""
        if self._copies is None or not self._copies.possible:
            return []
        copied = self._copies.draft(min(remaining, self._most_rows()) - 1, self._place.company())
        return copied[: self._fitting(len(copied), remaining)]

    def _fitting(self, gamma: int, remaining: int) -> int:
        """Of so many drafted tokens, no more than are wanted, and than are verified as if one by one."""
        if not gamma:
            return 0
        decoder, conversations, slot = self._place.decoder, self._place.conversations, self._place.slot
        conversations.cut(slot, len(conversations.tokens(slot)))
        return max(0, min(gamma, remaining - 1, decoder.cache.rows_alike(slot) - 1, self._most_rows() - 1))

    def _most_rows(self) -> int:
        """Rows that a verification may have."""
        company = self._place.company()
        return self._place.decoder.options.max_rows if self._alike or company == 1 else SHARED_ROWS // company

    def _verified(self, token: int, start: int, copied: list[int]) -> Work[list[tuple[int, Float32Array | Drawn]]]:
        """The target's tokens as far as a copied draft says the same, and one more, with what each was drawn from."""
        logits = yield self._rows([token, *copied], start)
        given: list[tuple[int, Float32Array | Drawn]] = []
        for row, expected in zip(logits, [*copied, None], strict=True):
            drawn = self._sampler.draw(row)
            given.append((drawn, row))
            if drawn != expected or drawn in self._ends:
                break
        return given

    def _plain(self, token: int, start: int) -> Work[tuple[int, Float32Array | Drawn]]:
        """A token without a draft, and what it was drawn from."""
        if not self._draws:
            logits = yield self._rows([token], start)
            return self._sampler.draw(logits[0]), logits[0]
        order = self._sampler.order()
        drawn: Drawn = yield Rows(
            slot=self._place.slot, start=start, tokens=[token], wanted=1, kind="drawn", draw=order
        )
        self._sampler.note(drawn.token)
        return drawn.token, drawn

    def _draft(self, token: int, start: int, gamma: int) -> Work[Proposal]:
        """Up to gamma tokens after one at position `start`."""
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
        """Rows of the slot from a position on, all of whose logits are wanted."""
        kind: RowKind = "draft" if draft else "decode"
        return Rows(slot=self._place.slot, start=start, tokens=tokens, wanted=len(tokens), kind=kind)
