"""Drafts copied from the text so far: where its last tokens stood before, the same ones may follow again.

Such a draft takes no step of the model, so it pays wherever a verification of several rows takes less than as many
plain steps. Two things decide how long it is, or that there is none: how often copied tokens stayed, by the length of
the match before them, and what steps take. The first is counted at every token, whether it was drafted or not, so a
text in which nothing can be copied is left alone, and one in which copies begin to fit is noticed, at no cost.

Source: Saxena 2023, Prompt Lookup Decoding; Leviathan et al. 2023, §3.1, for what a round gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.drafting import LARGEST_GAMMA
from runtime.engine.speculation.suffix_index import SuffixIndex

_PRIORS = (0.4, 0.4, 0.4, 0.7, 0.8, 0.9, 0.9)
"""The chance that a copied token stays before any was seen, by the bit length of the match's length."""
_PRIOR_WEIGHT, _MEMORY = 2.0, 24.0
"""How many tokens that opinion is worth, and about how many tokens of a kind back are remembered."""
_MARGIN = 1.1
"""How many times as many tokens a second a draft must promise as a plain step."""
_ROWS, _TYPICAL = (4, 8, 16), (1.5, 2.5, 4.5)
"""Rows of a step whose times are told apart, and what such a step takes, in plain steps, before any was seen: CPUs
unpack weights for four rows at a time, and GPUs for more."""
_NEW = 0.1
"""Weight of a new time in the mean."""
_FORGOTTEN, _EVERY = 1 / 8, 64
"""What is taken off what is known of verifications, after so many plain steps: what cost too much is tried again."""
_SHORT = 3e-4
"""Seconds of a plain step under which nothing is copied: some microseconds a token would be felt."""
_OUTLIER = 3.0
"""A time is taken for at most so many times what was expected: a step that something else held up says little."""


class StepTimes:
    """What steps of several rows take, in plain steps, as answers show it."""

    def __init__(self) -> None:
        self._plain, self._steps = 0.0, 0
        self._ratios = list(_TYPICAL)

    def note(self, rows: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            rows: Its rows, all of one sequence.
            seconds: What it took, with the tokens drawn from its logits.
        """
        if rows == 1:
            expected = self._plain or seconds
            self._plain = expected + _NEW * (min(seconds, _OUTLIER * expected) - expected)
            self._steps += 1
            if self._steps % _EVERY == 0:
                pairs = zip(self._ratios, _TYPICAL, strict=True)
                self._ratios = [ratio + _FORGOTTEN * (typical - ratio) for ratio, typical in pairs]
        elif self._plain:
            size = _size(rows)
            ratio = self._ratios[size]
            self._ratios[size] = ratio + _NEW * (min(seconds / self._plain, _OUTLIER * ratio) - ratio)

    @property
    def short(self) -> bool:
        """Whether plain steps are so short that looking for copies takes more than it gives."""
        return 0 < self._plain < _SHORT

    def ratio(self, rows: int) -> float:
        """What a step of so many rows takes, in plain steps."""
        return 1.0 if rows == 1 else self._ratios[_size(rows)]


class Copies:
    """The drafts of one answer that are copied from the text before them.

    Args:
        text: Tokens of the prompt, and of the answer so far.
        times: What steps take; shared by all answers of a model.
        ends: Tokens behind which nothing is drafted.
    """

    def __init__(self, text: Iterable[int], times: StepTimes, ends: Collection[int]) -> None:
        self._index, self._times, self._ends = SuffixIndex(text), times, ends
        self._stayed = [_PRIOR_WEIGHT * prior for prior in _PRIORS]
        self._tried = [_PRIOR_WEIGHT] * len(_PRIORS)

    @property
    def possible(self) -> bool:
        """Whether the last tokens stood somewhere before."""
        return self._index.length > 0

    def note(self, token: int) -> None:
        """Take the next token of the answer, drafted or not."""
        if self._index.length:
            kind = _kind(self._index.length)
            fading = 1 - 1 / _MEMORY
            self._stayed[kind] = self._stayed[kind] * fading + (token == self._index.next())
            self._tried[kind] = self._tried[kind] * fading + 1
        self._index.append(token)

    def draft(self, most: int, company: int = 1) -> list[int]:
        """The tokens to draft now; none where that promises nothing.

        Args:
            most: Tokens that may be drafted; none where it is 0.
            company: Sequences that make a step together, this one included; the others are taken to draft nothing.
        """
        length = self._index.length
        if not length or most < 1:
            return []
        chance = expected = 1.0
        plain = company / self._times.ratio(company)
        best, best_gain, most = 0, _MARGIN, min(most, LARGEST_GAMMA)
        for count in range(1, most + 1):
            kind = _kind(length + count - 1)
            chance *= self._stayed[kind] / self._tried[kind]
            expected += chance
            if count == most or company + count in _ROWS:
                gain = (company - 1 + expected) / self._times.ratio(company + count) / plain
                if gain > best_gain:
                    best, best_gain = count, gain
        found = self._index.continuation(best)
        end = next((i for i, token in enumerate(found) if token in self._ends), best)
        return found[: end + 1]


def _kind(length: int) -> int:
    """Which chance counts for a match of so many tokens."""
    return min(length.bit_length(), len(_PRIORS) - 1)


def _size(rows: int) -> int:
    """Which time counts for a step of so many rows."""
    return next((i for i, most in enumerate(_ROWS) if rows <= most), len(_ROWS) - 1)
