"""Decoding of one slot: plain steps, and rounds of speculation that draft, verify, accept and roll back.

Tokens are drafted cheaply, and the model verifies several in one step. Drafts are copied from earlier text that
continued after the same tokens, made by a block that predicts further tokens, or by the model itself: with its low-bit
weights, no or little compensation, and only the upper plane of a hierarchical cache. The target is the model as it
decodes without speculation.

A round begins with a token that is not in the cache yet, at the end of the sequence. The draft is copied from the text
if that is expected to pay; otherwise the block or the model drafts, if enabled. Model drafts write keys and values of
their own after that token; verification starts at the same position and overwrites them with the target's. Rejected
rows are truncated before the next round.

Rejection sampling keeps the target's distribution: a token x, drafted from q, is accepted with probability
min(1, p(x) / q(x)), and the first rejected one is replaced by a sample from max(0, p - q), normalized; after a fully
accepted draft, one more token is sampled from p. Greedy decoding is the limit: a token is accepted if p has the same
maximum. For a copied draft, or the block's most likely tokens, the target samples each token as it would alone, and the
draft is accepted as far as it agrees: the same rule for a deterministic draft. It consumes the same random numbers as
plain decoding, so a seed gives the same answer with and without such drafts.

A round is short enough that plain decoding would not have flushed a page in its middle
(`KVCache.batch_invariant_rows`), so each row sees exactly what it would see in plain decoding.

Source: QuantSpec §4.1 and 4.3, Algorithm 1; Leviathan et al. 2023, §2.3 and appendix A.1; Saxena 2023, Prompt Lookup
Decoding, for copied drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.backends.decoder import Decoder, DrawsTokens, Float32Array
from runtime.engine.conversations import Conversations
from runtime.engine.copying import Copies, StepTimes
from runtime.engine.gamma import Costs, FixedGamma, Gamma, gamma_of
from runtime.engine.generation import Counts, Source, Speculation
from runtime.engine.mtp import IN_PAUSES, MtpDrafts
from runtime.engine.work import RowKind, Rows, Work
from runtime.text.constraint import Constraint
from runtime.text.sampling import Distribution, Drawn, Sampler, SamplingOptions

SHARED_ROWS = 16
"""Most rows of a verification of several sequences together: as many as a CPU unpacks weights for at once. Beyond this,
one sequence's drafts slow down the others."""
Take = Callable[[int, Float32Array | Drawn], bool]
"""Receives a token and the target's logits [V] that it was sampled from (or the decoder's sample, if it samples);
returns whether to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    tokens: Sequence[int]
    drawn_from: Sequence[Distribution]
    """The distribution q that each was drawn from."""


def accept(proposal: Proposal, logits: Float32Array, sampler: Sampler) -> list[int]:
    """The tokens of a verified draft.

    Args:
        proposal: gamma drafted tokens.
        logits: float32 [gamma + 1, V], the target's after the token before the draft and after each drafted one.
        sampler: The sampler; the tokens it has noted end before the draft. It notes nothing here.

    Returns:
        The accepted tokens, and one more.
    """
    given: list[int] = []
    for row, (token, q) in enumerate(zip(proposal.tokens, proposal.drawn_from, strict=True)):
        p = sampler.distribution(logits[row], given)
        if sampler.uniform() * q.probability(token) >= p.probability(token):
            return [*given, sampler.pick(beyond(p, q))]
        given.append(token)
    return [*given, sampler.pick(sampler.distribution(logits[len(given)], given))]


def beyond(p: Distribution, q: Distribution) -> Distribution:
    """max(0, p - q); or p, if rounding leaves nothing."""
    weights = p.weights / p.weights.sum()
    places = np.searchsorted(q.tokens, p.tokens)
    inside = places < q.tokens.size
    inside[inside] = q.tokens[places[inside]] == p.tokens[inside]
    weights[inside] -= q.weights[places[inside]] / q.weights.sum()
    kept = weights > 0
    return Distribution(p.tokens[kept], weights[kept]) if kept.any() else p


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
        batch_invariant: Whether gamma must not depend on concurrent sequences, so that samples do not either.
        times: Step durations, for copying drafts from the text; None: no copying.
        mtp: Drafts in place of the model; None: the model drafts.
    """

    def __init__(
        self,
        context: DecodeContext,
        sampler: Sampler,
        gamma: Gamma,
        *,
        ends: Collection[int],
        batch_invariant: bool = False,
        times: StepTimes | None = None,
        mtp: MtpDrafts | None = None,
    ) -> None:
        self._context, self._sampler, self._gamma = context, sampler, gamma
        self._ends, self._batch_invariant, self._times = ends, batch_invariant, times
        self._copies: Copies | None = None
        self._draws = isinstance(context.decoder, DrawsTokens) and not sampler.needs_logits and mtp is None
        self._left: Float32Array | None = None  # what the last step left for its rows
        self.mtp = mtp
        """Drafts of the block that predicts further tokens; has to follow the prompt."""
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
        if self.mtp is not None:
            yield from self.mtp.catch_up(self._context.slot)
        guess = copied = self._copied(remaining)
        gamma = 0 if copied else self._fitting(self._gamma.next(), remaining)
        source: Source = "copies" if copied else "model" if self.mtp is None else "head"
        if gamma and self.mtp is not None:
            guess = yield from self.mtp.draft(self._context.slot, token, gamma, self._ends)
        if guess:
            given, drafted = (yield from self._verified(token, start, guess)), len(guess)
        elif gamma and self.mtp is None:
            proposal = yield from self._draft(token, start, gamma)
            logits = yield from self._target([token, *proposal.tokens], start)
            tokens, drafted = accept(proposal, logits, self._sampler), len(proposal.tokens)
            given = list(zip(tokens, logits, strict=False))
            for each in tokens:
                self._sampler.note(each)
        else:
            given, drafted = [(yield from self._plain(token, start))], 0
        if self.mtp is not None and self._left is not None:
            kept = [token, *(each for each, _ in given[:-1])]
            self.mtp.follow(self._context.slot, start, kept, self._left)
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
        self.counts.add(drafted, len(given) - 1, source)
        return given

    def _copied(self, remaining: int) -> list[int]:
        """Tokens to copy as the next draft; empty if that is not expected to pay."""
        if self._copies is None or not self._copies.possible:
            return []
        gain = self._gamma.gain if self.mtp is not None else 1.0
        copied = self._copies.draft(min(remaining, self._most_rows()) - 1, self._context.concurrent(), gain)
        return copied[: self._fitting(len(copied), remaining)]

    def _fitting(self, gamma: int, remaining: int) -> int:
        """The draft length, limited to the tokens still wanted and to rows that verify as if one by one."""
        if not gamma:
            return 0
        decoder, conversations, slot = self._context.decoder, self._context.conversations, self._context.slot
        conversations.cut(slot, len(conversations.tokens(slot)))
        return max(0, min(gamma, remaining - 1, decoder.cache.batch_invariant_rows(slot) - 1, self._most_rows() - 1))

    def _most_rows(self) -> int:
        """Most rows of a verification."""
        concurrent = self._context.concurrent()
        return (
            self._context.decoder.options.max_rows
            if self._batch_invariant or concurrent == 1
            else SHARED_ROWS // concurrent
        )

    def _verified(self, token: int, start: int, guess: list[int]) -> Work[list[tuple[int, Float32Array | Drawn]]]:
        """The target's tokens as far as a draft agrees, and one more, each with what it was sampled from."""
        logits = yield from self._target([token, *guess], start)
        given: list[tuple[int, Float32Array | Drawn]] = []
        for row, expected in zip(logits, [*guess, None], strict=True):
            drawn = self._sampler.draw(row)
            given.append((drawn, row))
            if drawn != expected or drawn in self._ends:
                break
        return given

    def _plain(self, token: int, start: int) -> Work[tuple[int, Float32Array | Drawn]]:
        """Decode a token without a draft. Returns it with what it was sampled from."""
        if not self._draws:
            logits = yield from self._target([token], start)
            return self._sampler.draw(logits[0]), logits[0]
        order = self._sampler.draw_inputs()
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

    def _target(self, tokens: list[int], start: int) -> Work[Float32Array]:
        """The target's logits [M, V] after each of some tokens."""
        rows = self._rows(tokens, start)
        found = yield rows
        logits: Float32Array
        logits, self._left = found if rows.left else (found, None)
        return logits

    def _rows(self, tokens: list[int], start: int, *, draft: bool = False) -> Rows:
        """Rows of the slot from a position on, computing all their logits."""
        kind: RowKind = "draft" if draft else "decode"
        left = self.mtp is not None and not draft and self._gamma.resting <= IN_PAUSES
        return Rows(slot=self._context.slot, start=start, tokens=tokens, wanted=len(tokens), kind=kind, left=left)


class Drafting:
    """What answers begin to draft with.

    Args:
        gamma: Tokens that the model drafts in each round, and none is copied; or what steps cost, and the best number
            is found while answers go on; None: it drafts none.
        copied: Whether drafts are copied from the text where that pays.
        mtp: The block that drafts in place of the model; None: the model itself.

    Raises:
        RequestError: gamma is out of range.
    """

    def __init__(self, gamma: int | Costs | None = None, *, copied: bool = True, mtp: MtpDrafts | None = None) -> None:
        self.mtp = mtp
        self.gamma: Gamma | None = None if gamma is None else gamma_of(gamma, by_head=mtp is not None)
        """How many tokens the model drafts; None: none."""
        self._first = self.gamma.current if self.gamma else 0
        self._times = StepTimes() if copied and not isinstance(gamma, int) else None

    def rounds(
        self, context: DecodeContext, options: SamplingOptions, constraint: Constraint | None, *, ends: Collection[int]
    ) -> Rounds:
        """The decoding of one answer. With a seed, draws depend neither on timing nor on other requests.

        A draft of the model takes random numbers of its own, and knows no grammar. Others take none.

        Args:
            context: Where.
            options: How tokens are drawn.
            constraint: What they must keep to.
            ends: Tokens behind which nothing is drafted.
        """
        sampler, gamma = Sampler(options, constraint=constraint), self.gamma or FixedGamma(0)
        seeded = options.seed is not None and not sampler.greedy
        if self.mtp is not None:
            gamma.begin()
            return Rounds(context, sampler, gamma, ends=ends, times=self._times, mtp=self.mtp)
        if sampler.constrained:
            gamma = FixedGamma(0)
        elif seeded:
            gamma = FixedGamma(self._first)
        times = None if seeded and gamma.current else self._times
        return Rounds(context, sampler, gamma, ends=ends, batch_invariant=seeded, times=times)
