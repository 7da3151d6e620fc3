"""Sampling on the GPU: sends one number to the host instead of a vocabulary of logits.

Filters and their order are those of `runtime.text.sampling.filtered`, as is the draw: the position of one uniform
number of the seed's stream in the cumulative weights in the order of token ids. So a seed gives the CPU's tokens,
except when the number falls between two roundings of a sum. Everything is one sequence of launches over all logits,
without waits or data-dependent sizes: the host finishes while the device still computes the logits.
"""

from __future__ import annotations

import torch

from runtime.text.sampling import MAX_LOGPROBS, NEGLIGIBLE, Draw, Drawn, SamplingOptions

SEEN = 4096
"""Most penalized tokens of a draw that is captured; an answer with more distinct ones is drawn kernel by kernel."""
_FEWEST = 16


class HostDraws:
    """Inputs and results of draws in page-locked memory, a row for each: what a captured draw reads and writes."""

    def __init__(self, rows: int, vocab: int, *, pinned: bool) -> None:
        self._vocab = vocab
        self._many: dict[int, torch.Tensor] = {}
        self._uniform = torch.zeros((rows, 1), dtype=torch.float64, pin_memory=pinned)
        self._seen = torch.zeros((rows, SEEN), dtype=torch.int32, pin_memory=pinned)
        self._numbers = torch.zeros((rows, 2 + 2 * MAX_LOGPROBS), dtype=torch.float64, pin_memory=pinned)

    def put(self, row: int, draw: Draw) -> int:
        """Put a draw's inputs. Returns the size that its penalized tokens are filled up to; too many keep their own."""
        self._uniform[row, 0] = draw.uniform
        if not draw.seen.size:
            return 0
        if draw.seen.size > SEEN:
            self._many[row] = torch.from_numpy(draw.seen)
            return int(draw.seen.size)
        room = max(_FEWEST, 1 << (int(draw.seen.size) - 1).bit_length())
        self._seen[row, :room] = int(draw.seen[0])  # penalized twice is penalized once
        self._seen[row, : draw.seen.size] = torch.from_numpy(draw.seen)
        return room

    def launch(self, row: int, options: SamplingOptions, room: int, logits: torch.Tensor) -> None:
        """Sample from logits float32 [V], which are on the device, without waiting; the numbers arrive in the row."""
        uniform = self._uniform[row].to(logits.device, non_blocking=True)
        host = self._many.pop(row) if room > SEEN else self._seen[row, :room]
        seen = host.to(logits.device, non_blocking=True).long()
        numbers = numbers_of(logits, options, uniform, seen if room else None)
        self._numbers[row, : numbers.numel()].copy_(numbers, non_blocking=True)

    def result(self, row: int, options: SamplingOptions) -> Drawn:
        """The sampled token, once the device has been waited for."""
        count = 1 if options.logprobs is None else 2 + 2 * min(options.logprobs, self._vocab)
        return drawn_of(self._numbers[row, :count])


def numbers_of(
    logits: torch.Tensor, options: SamplingOptions, uniform: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    """Sample from finite logits float32 [V], without waiting; penalized tokens `seen`, int64 [n], may repeat.

    Returns float64 [1], or [2 + 2 n] with n log-probabilities: the token, its log-probability, those of the n most
    likely and their token ids, which are exact. For `drawn_of`.
    """
    token = draw(_penalized(logits, options, seen), options, uniform)
    if options.logprobs is None:
        return token.double()
    highest = logits.amax()
    normalizer = torch.exp(logits - highest).double().sum().log() + highest
    best = logits.topk(min(options.logprobs, logits.numel()))
    own, others = logits[token].double() - normalizer, best.values.double() - normalizer
    return torch.cat((token.double(), own, others, best.indices.double()))


def drawn_of(numbers: torch.Tensor) -> Drawn:
    """The sampled token, from the output of `numbers_of` on the host."""
    token, *rest = numbers.tolist()
    if not rest:
        return Drawn(int(token))
    own, *rest = rest
    n = len(rest) // 2
    ranked = sorted(zip(map(int, rest[n:]), rest[:n], strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Drawn(int(token), own, ranked)


def _penalized(logits: torch.Tensor, options: SamplingOptions, seen: torch.Tensor | None) -> torch.Tensor:
    """Logits [V] after the repetition penalty; see `runtime.text.sampling.Sampler`."""
    if seen is None:
        return logits
    # A tensor, by which the device divides as the host does; by a number it would multiply by the reciprocal.
    penalty = torch.full((1,), options.repetition_penalty, device=logits.device)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def draw(logits: torch.Tensor, options: SamplingOptions, uniform: torch.Tensor) -> torch.Tensor:
    """Sample a token from logits float32 [V] by uniform float64 [1] in [0, 1): int64 [1]; does not wait for the device.

    The repetition penalty has been applied, or is 1.
    """
    if options.greedy:
        # The first of equal ones; the last of all if NaN equals none.
        numbers = torch.arange(logits.numel(), device=logits.device)
        return torch.where(logits == logits.amax(), numbers, logits.numel() - 1).amin().view(1)
    weights = filtered(logits, options)
    cumulative = weights.cumsum(0)
    places = torch.searchsorted(cumulative, uniform * cumulative[-1:], right=True)
    # Behind the last weight only where the sum was rounded: the last token that has one is meant then.
    last = torch.where(weights > 0, torch.arange(weights.numel(), device=weights.device), 0).amax()
    return torch.minimum(places, last)


def filtered(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Sampling weights float64 [V] of logits [V], proportional to probabilities; 0 for filtered tokens."""
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
    """Mask of the k most likely tokens, bool [V]; any of those tied at the border."""
    best = torch.zeros_like(logits, dtype=torch.bool)
    return best.index_fill_(0, logits.topk(k).indices, value=True)


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask of the smallest set of tokens that reaches the share top_p, bool [V]; ties go to the first."""
    ordered, order = weights.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).index_copy_(0, order, before < top_p * weights.sum())
