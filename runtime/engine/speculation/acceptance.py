"""Rejection sampling: which drafted tokens stay, and what stands in place of the first that does not.

A drafted token x, drawn from q, stays with probability min(1, p(x) / q(x)). In place of the first that does not stand
is one from max(0, p - q), scaled to a distribution; behind a draft that stays as a whole, one from p. The tokens that
come out are distributed as those of p alone. A greedy choice is the limit: a token stays where p has the same.

Source: Leviathan et al. 2023, §2.3 and appendix A.1; QuantSpec, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.text.sampling import Distribution, Float32Array, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Drafted tokens."""

    tokens: Sequence[int]
    """In their order."""
    drawn_from: Sequence[Distribution]
    """What each was drawn from: q."""


def accept(proposal: Proposal, logits: Float32Array, sampler: Sampler) -> list[int]:
    """The tokens that a verified draft gives.

    Args:
        proposal: gamma drafted tokens.
        logits: float32 [gamma + 1, V], the target's after the token before the draft and after each drafted one.
        sampler: Draws; what it has noted ends before the draft. It notes nothing.

    Returns:
        The drafted tokens that stay, and one more.
    """
    given: list[int] = []
    for row, (token, q) in enumerate(zip(proposal.tokens, proposal.drawn_from, strict=True)):
        p = sampler.distribution(logits[row], given)
        if sampler.uniform() * q.probability(token) >= p.probability(token):
            return [*given, sampler.pick(beyond(p, q))]
        given.append(token)
    return [*given, sampler.pick(sampler.distribution(logits[len(given)], given))]


def beyond(p: Distribution, q: Distribution) -> Distribution:
    """What p has beyond q: max(0, p - q). p itself where that is nothing, as rounding may have it."""
    weights = p.weights / p.weights.sum()
    places = np.searchsorted(q.tokens, p.tokens)
    inside = places < q.tokens.size
    inside[inside] = q.tokens[places[inside]] == p.tokens[inside]
    weights[inside] -= q.weights[places[inside]] / q.weights.sum()
    kept = weights > 0
    return Distribution(p.tokens[kept], weights[kept]) if kept.any() else p
