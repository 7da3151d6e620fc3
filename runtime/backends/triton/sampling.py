"""The next token, drawn where the logits are: a number goes to the host instead of a vocabulary of them.

The same filters in the same order as `runtime.sampling.filtered`, and the same draw: the place of one uniform number of
the seed's own stream among the weights added up in the order of token ids. So one seed gives the CPU's tokens, but for
numbers that fall between two roundings of a sum. Everything is one sequence of launches over all logits, without a wait
and without sizes that depend on the numbers, so that it can be captured in a graph.
"""

from __future__ import annotations

import torch

from runtime.sampling import GREEDY_BELOW, NEGLIGIBLE, SamplingOptions


def draw(logits: torch.Tensor, options: SamplingOptions, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token.

    Args:
        logits: float32 [V], finite.
        options: temperature, top_k, top_p and min_p count; the repetition penalty has been applied, or is 1.
        uniform: float64 [1] in [0, 1), on the logits' device; not read where the draw is greedy.

    Returns:
        int64 [1], the token's id; nothing was waited for.
    """
    if options.temperature < GREEDY_BELOW or options.top_k == 1:
        numbers = torch.arange(logits.numel(), device=logits.device)
        return torch.where(logits == logits.amax(), numbers, logits.numel()).amin().view(1)  # the first of equal ones
    weights = filtered(logits, options)
    cumulative = weights.cumsum(0)
    places = torch.searchsorted(cumulative, uniform * cumulative[-1:], right=True)
    # Behind the last weight only where the sum was rounded: the last token that has one is meant then.
    last = torch.where(weights > 0, torch.arange(weights.numel(), device=weights.device), 0).amax()
    return torch.minimum(places, last)


def filtered(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """How likely each token is to be drawn.

    Args:
        logits: float32 [V].
        options: temperature above 0, top_k, top_p and min_p.

    Returns:
        Weights float64 [V], proportional to probabilities; 0 for what is not drawn.
    """
    highest = logits.amax()
    kept = logits >= highest - NEGLIGIBLE * options.temperature
    if 0 < options.top_k < logits.numel():
        kept = kept & _among_the_best(logits, options.top_k)
    weights = torch.exp((logits - highest) / options.temperature).double()
    weights = torch.where(kept, weights, 0.0)
    if options.top_p < 1:
        weights = torch.where(_nucleus(weights, options.top_p), weights, 0.0)
    if options.min_p > 0:
        weights = torch.where(weights >= options.min_p * weights.amax(), weights, 0.0)
    return weights


def _among_the_best(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Whether a token is among the k most likely, bool [V]; of equal ones at the border, any."""
    best = torch.zeros_like(logits, dtype=torch.bool)
    return best.index_fill_(0, logits.topk(k).indices, value=True)


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Whether a token is one of the fewest that reach the share top_p of all weights, bool [V]; of equals the first."""
    ordered, order = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).index_copy_(0, order, before < top_p * weights.sum())
