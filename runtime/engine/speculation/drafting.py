"""How the answers of an engine are drafted: by the model, copied from the text, or not at all."""

from __future__ import annotations

from collections.abc import Collection

from runtime.engine.speculation.copying import StepTimes
from runtime.engine.speculation.gamma import Costs, FixedGamma, Gamma, gamma_of
from runtime.engine.speculation.rounds import DecodeContext, Rounds
from runtime.text.constraint import Constraint
from runtime.text.sampling import Sampler, SamplingOptions


class Drafting:
    """What answers begin to draft with.

    Args:
        gamma: Tokens that the model drafts in each round, and none is copied; or what steps cost, and the best number
            is found while answers go on; None: it drafts none.
        copied: Whether drafts are copied from the text where that pays.

    Raises:
        RequestError: gamma is out of range.
    """

    def __init__(self, gamma: int | Costs | None = None, *, copied: bool = True) -> None:
        self.gamma: Gamma | None = None if gamma is None else gamma_of(gamma)
        """How many tokens the model drafts; None: none."""
        self._first = self.gamma.current if self.gamma else 0
        self._times = StepTimes() if copied and not isinstance(gamma, int) else None

    def rounds(
        self, context: DecodeContext, options: SamplingOptions, constraint: Constraint | None, *, ends: Collection[int]
    ) -> Rounds:
        """The decoding of one answer. With a seed, draws depend neither on timing nor on other requests.

        A draft of the model takes random numbers of its own, and knows no grammar. A copied one takes none.

        Args:
            context: Where.
            options: How tokens are drawn.
            constraint: What they must keep to.
            ends: Tokens behind which nothing is drafted.
        """
        sampler, gamma = Sampler(options, constraint=constraint), self.gamma or FixedGamma(0)
        seeded = options.seed is not None and not sampler.greedy
        if sampler.constrained:
            gamma = FixedGamma(0)
        elif seeded:
            gamma = FixedGamma(self._first)
        times = None if seeded and gamma.current else self._times
        return Rounds(context, sampler, gamma, ends=ends, alike=seeded, times=times)
