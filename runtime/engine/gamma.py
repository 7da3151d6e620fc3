"""Gamma: chooses the draft length with the highest expected throughput, or 0 if plain decoding is faster.

If each drafted token is accepted with probability a, a round of gamma drafts yields (1 - a^(gamma + 1)) / (1 - a)
tokens and costs gamma draft steps and a verification of gamma + 1 rows. These costs are measured when a model is
loaded. During answers, the measured durations of rounds and plain steps rescale them together, since a longer context
slows both, and a is learned.

Source: Leviathan et al. 2023, §3.1 and 3.5; QuantSpec, Table 6 and appendix G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.drafting import LARGEST_GAMMA
from runtime.errors import RequestError

MAX_SEARCHED = 7
"""Largest gamma considered: 8 rows are the widest step that costs a CPU little more than one."""
_PRIOR, _PRIOR_WEIGHT, _WEIGHT_OF_HEADS = 0.85, 8.0, 2.0
"""Prior acceptance, and its weight in tokens: of a model's own drafts, and of those of its head, which may be bad."""
_OF_BEFORE = 2.0
"""Weight in tokens, at most, of what earlier answers say of acceptance by a head: it differs between answers."""
_MEMORY = 128.0
"""Roughly how many recent drafted tokens acceptance is estimated from."""
_NEW = 0.1
"""Weight of a new time in the moving average."""
_OUTLIER = 3.0
"""Outlier limit: a measured time counts as at most this many times the expected one."""
_ROUNDS_BETWEEN = 64
"""Rounds between the plain steps that keep their measured time up to date."""
_FIRST_ROUNDS, _FIRST_OF_HEADS = 16, 4
"""Rounds before the first plain step."""
_PAUSE, _LONGEST_PAUSE = 32, 512
"""Plain tokens before speculation is retried, at first and at most."""
_TRY = 4
"""Rounds of a trial: a single delayed round must not decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Durations of steps.

    Raises:
        RequestError: a time is not positive, or there are no verifications.
    """

    plain: float
    """Seconds of a plain step of the target."""
    draft: float
    """Seconds of a draft step."""
    verify: Sequence[float]
    """Seconds of a verification of 2, 3, ... rows."""

    def __post_init__(self) -> None:
        if not self.verify or min(self.plain, self.draft, *self.verify) <= 0:
            raise RequestError("what steps cost must be positive, of one verification at least")

    def round_s(self, gamma: int) -> float:
        """Seconds of a round; gamma 0 is a plain step."""
        return gamma * self.draft + self.verify[gamma - 1] if gamma else self.plain


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Expected tokens per round.

    Args:
        gamma: Tokens drafted.
        acceptance: Probability that a drafted token is accepted if those before it were, in [0, 1].
    """
    return sum(acceptance**i for i in range(gamma + 1))


def speedup(costs: Costs, gamma: int, acceptance: float) -> float:
    """Throughput of rounds of gamma drafts relative to plain decoding."""
    return expected_tokens(gamma, acceptance) * costs.plain / costs.round_s(gamma)


def best_gamma(costs: Costs, acceptance: float) -> int:
    """The gamma with the highest throughput; 0 if plain decoding is fastest."""
    return max(range(len(costs.verify) + 1), key=lambda gamma: speedup(costs, gamma, acceptance))


def break_even(costs: Costs) -> float | None:
    """The lowest acceptance, in steps of 0.01, at which some gamma beats plain decoding; None if there is none."""
    return next((a / 100 for a in range(101) if best_gamma(costs, a / 100)), None)


class FixedGamma:
    """A constant draft length."""

    gain, resting = 1.0, 0
    """Unknown, and never."""

    def __init__(self, gamma: int) -> None:
        self.current = gamma

    def next(self) -> int:
        return self.current

    def begin(self) -> None:
        """Nothing to do."""

    def note(self, drafted: int, accepted: int, seconds: float) -> None:
        """Ignored."""


class AdaptiveGamma:
    """The draft length that is best by measured costs and acceptance."""

    def __init__(self, costs: Costs, *, by_head: bool = False) -> None:
        self._costs = costs
        weight = _WEIGHT_OF_HEADS if by_head else _PRIOR_WEIGHT
        self._stayed, self._tried = _PRIOR * weight, weight
        self._round_ratio = self._plain_ratio = 1.0
        self._plain_known = False
        self._since_plain = _ROUNDS_BETWEEN - (_FIRST_OF_HEADS if by_head else _FIRST_ROUNDS)
        self._left = self._trial = 0
        self._pause = _PAUSE

    @property
    def acceptance(self) -> float:
        return self._stayed / self._tried

    @property
    def current(self) -> int:
        """The best choice according to current estimates."""
        return best_gamma(self._now(), self.acceptance)

    def begin(self) -> None:
        """Begin another answer by a head's drafts: try them, and remember less of acceptance."""
        share = min(1.0, _OF_BEFORE / self._tried)
        self._stayed, self._tried = share * self._stayed, share * self._tried
        self._left, self._pause, self._trial = 0, _PAUSE, 0

    @property
    def resting(self) -> int:
        """Plain tokens until the next trial; 0 where drafts are not paused."""
        return self._left

    @property
    def gain(self) -> float:
        """Throughput with the best choice, relative to plain decoding."""
        now = self._now()
        return speedup(now, best_gamma(now, self.acceptance), self.acceptance)

    def next(self) -> int:
        """Tokens to draft in the next round; 0: take a plain step."""
        if self._left:
            self._left -= 1
            return 0
        now = self._now()
        best = best_gamma(now, self.acceptance)
        if best:
            self._pause, self._trial = _PAUSE, 0
            self._since_plain += 1
            if self._since_plain > _ROUNDS_BETWEEN:
                self._since_plain = 0
                return 0
            return best
        self._trial += 1
        if self._trial >= _TRY:
            self._trial = 0
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return max(range(1, len(now.verify) + 1), key=lambda gamma: speedup(now, gamma, self.acceptance))

    def note(self, drafted: int, accepted: int, seconds: float) -> None:
        """Record a round: tokens drafted and accepted, and its duration."""
        if drafted > len(self._costs.verify):
            return
        ratio = min(seconds / self._costs.round_s(drafted), _OUTLIER * max(self._round_ratio, self._plain_ratio))
        if drafted == 0:
            self._plain_ratio += (_NEW if self._plain_known else 1) * (ratio - self._plain_ratio)
            self._plain_known = True
            return
        self._round_ratio += _NEW * (ratio - self._round_ratio)
        if not self._plain_known:  # sampling takes time beside a step: it lengthens both
            self._plain_ratio = self._round_ratio
        tried = min(drafted, accepted + 1)
        fading = 1 - tried / _MEMORY
        self._stayed, self._tried = self._stayed * fading + accepted, self._tried * fading + tried

    def _now(self) -> Costs:
        """Costs rescaled by recent rounds and plain steps."""
        costs, ratio = self._costs, self._round_ratio
        return Costs(
            plain=costs.plain * self._plain_ratio,
            draft=costs.draft * ratio,
            verify=[seconds * ratio for seconds in costs.verify],
        )


Gamma = FixedGamma | AdaptiveGamma
"""Chooses the draft length of the next round."""


def gamma_of(choice: int | Costs, *, by_head: bool = False) -> Gamma:
    """The policy for a requested draft length: a fixed number, or an adaptive one from measured costs.

    See `AdaptiveGamma`.

    Raises:
        RequestError: the number is out of range.
    """
    if isinstance(choice, Costs):
        return AdaptiveGamma(choice, by_head=by_head)
    if not 1 <= choice <= LARGEST_GAMMA:
        raise RequestError(f"gamma is {choice}; it must be from 1 to {LARGEST_GAMMA}")
    return FixedGamma(choice)
