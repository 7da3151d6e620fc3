"""Rejection sampling: accepts or replaces drafted tokens so that the output follows the target's distribution.

A token x, drafted from q, is accepted with probability min(1, p(x) / q(x)). The first rejected token is replaced by a
sample from max(0, p - q), normalized; after a fully accepted draft, one more token is sampled from p. The output is
distributed as samples from p alone. Greedy decoding is the limit: a token is accepted if p has the same maximum.

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
