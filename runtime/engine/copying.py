"""Prompt lookup: drafts copied from earlier text that followed the same tokens.

A copied draft needs no step of the model, so it pays wherever verifying several rows takes less time than as many plain
steps. Its length, or whether to draft at all, follows from two statistics: how often copied tokens were accepted, by
the length of the match, and how long steps take. Acceptance is counted at every token, drafted or not, so a text
without repetition is left alone, and one that starts to repeat is noticed, at no cost.

The text is indexed by chains of equal n-grams, as LZ77 compressors do: a table holds the latest position of each
n-gram, and each position links to the previous one with the same n-gram. A token costs a few table accesses. While the
sequence keeps repeating, no search is needed: the match simply advances.

Source: Saxena 2023, Prompt Lookup Decoding; Leviathan et al. 2023, §3.1, for what a round gives; Deutsch 1996, RFC 1951
§4, for the chains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.drafting import LARGEST_GAMMA

NGRAM = 3
"""Shortest match, in tokens."""
CANDIDATES = 8
"""Most positions that a search compares, latest first."""
LONGEST = 64
"""Most tokens compared at each position."""
_PRIORS = (0.4, 0.4, 0.4, 0.7, 0.8, 0.9, 0.9)
"""Prior acceptance of a copied token, by the bit length of the match's length."""
_PRIOR_WEIGHT, _MEMORY = 2.0, 24.0
"""Weight of the prior in tokens, and roughly how many recent tokens of a kind are remembered."""
_MARGIN = 1.1
"""A draft must promise this many times the throughput of plain steps."""
_ROWS, _TYPICAL = (4, 8, 16), (1.5, 2.5, 4.5)
"""Row counts whose step times are tracked separately, with prior times in plain steps: CPUs unpack weights for four
rows at a time, and GPUs for more."""
_NEW = 0.1
"""Weight of a new time in the moving average."""
_FORGOTTEN, _EVERY = 1 / 8, 64
"""Every 64 plain steps, the measured verification times lose 1/8, so that a width that once cost too much is tried
again."""
_SHORT = 3e-4
"""Below this time of a plain step, in seconds, nothing is copied: the lookup's microseconds per token would matter."""
_OUTLIER = 3.0
"""Outlier limit: a measured time counts as at most this many times the expected one."""


class SuffixIndex:
    """A sequence of tokens, and the earlier position that its end repeats.

    Memory: some 200 bytes a token.

    Args:
        tokens: The beginning of the sequence.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = list(tokens)
        first = self._tokens
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> end of its latest position
        self._before = [0] * min(NGRAM, len(first) + 1)  # by end: end of the previous position, 0 for none
        for end, ngram in enumerate(zip(*(first[i:] for i in range(NGRAM)), strict=False), NGRAM):
            self._link(end, ngram)
        self._at = 0  # end of the earlier match
        self.length = 0
        """Length of the known match of the last tokens; 0 if it is shorter than `NGRAM`."""
        self._search()

    def append(self, token: int) -> None:
        tokens, at = self._tokens, self._at
        goes_on = self.length > 0 and tokens[at] == token
        tokens.append(token)
        self._link(len(tokens), tuple(tokens[-NGRAM:]))
        if goes_on:
            self._at, self.length = at + 1, self.length + 1
        else:
            self._search()

    def next(self) -> int:
        """The token that followed the match. There must be one."""
        return self._tokens[self._at]

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens that followed the match, repeated periodically beyond the end."""
        tokens = self._tokens[self._at : self._at + count]
        period = len(tokens)
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens

    def _link(self, end: int, ngram: tuple[int, ...]) -> None:
        """Link the n-gram that ends here."""
        if end < NGRAM:
            self._before.append(0)
            return
        self._before.append(self._latest.get(ngram, 0))
        self._latest[ngram] = end

    def _search(self) -> None:
        """Find the longest match among the latest positions of the last n-gram; ties go to the latest."""
        tokens, end = self._tokens, len(self._tokens)
        self._at = self.length = 0
        at = self._before[end] if end >= NGRAM else 0
        for _ in range(CANDIDATES):
            if not at:
                break
            length, most = NGRAM, min(LONGEST, at)
            while length < most and tokens[at - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self.length:
                self._at, self.length = at, length
            at = self._before[at]


class StepTimes:
    """Durations of steps with several rows, in plain steps, as measured during answers."""

    def __init__(self) -> None:
        self._plain, self._steps = 0.0, 0
        self._ratios = list(_TYPICAL)

    def note(self, rows: int, seconds: float) -> None:
        """Record a step.

        Args:
            rows: Its number of rows, all of one sequence.
            seconds: Its duration, including sampling from its logits.
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
        """Whether plain steps are so short that the lookup costs more than it gains."""
        return 0 < self._plain < _SHORT

    def ratio(self, rows: int) -> float:
        """Duration of a step with this many rows, in plain steps."""
        return 1.0 if rows == 1 else self._ratios[_size(rows)]


class Copies:
    """The copied drafts of one answer.

    Args:
        text: Tokens of the prompt, and of the answer so far.
        times: Step durations; shared by all answers of a model.
        ends: Tokens after which nothing is drafted.
    """

    def __init__(self, text: Iterable[int], times: StepTimes, ends: Collection[int]) -> None:
        self._index, self._times, self._ends = SuffixIndex(text), times, ends
        self._stayed = [_PRIOR_WEIGHT * prior for prior in _PRIORS]
        self._tried = [_PRIOR_WEIGHT] * len(_PRIORS)

    @property
    def possible(self) -> bool:
        """Whether the last tokens occurred before."""
        return self._index.length > 0

    def note(self, token: int) -> None:
        """Record the next token of the answer, drafted or not."""
        if self._index.length:
            kind = _kind(self._index.length)
            fading = 1 - 1 / _MEMORY
            self._stayed[kind] = self._stayed[kind] * fading + (token == self._index.next())
            self._tried[kind] = self._tried[kind] * fading + 1
        self._index.append(token)

    def draft(self, most: int, concurrent: int = 1, others: float = 1.0) -> list[int]:
        """The tokens to draft now; empty if a draft is not expected to pay.

        Args:
            most: Most tokens to draft; 0: none.
            concurrent: Sequences in the next step, including this one; the others are assumed not to draft.
            others: How many times the throughput of plain steps other drafts promise.
        """
        length = self._index.length
        if not length or most < 1:
            return []
        chance = expected = 1.0
        plain = concurrent / self._times.ratio(concurrent)
        best, best_gain, most = 0, max(_MARGIN, others), min(most, LARGEST_GAMMA)
        for count in range(1, most + 1):
            kind = _kind(length + count - 1)
            chance *= self._stayed[kind] / self._tried[kind]
            expected += chance
            if count == most or concurrent + count in _ROWS:
                gain = (concurrent - 1 + expected) / self._times.ratio(concurrent + count) / plain
                if gain > best_gain:
                    best, best_gain = count, gain
        tokens = self._index.continuation(best)
        end = next((i for i, token in enumerate(tokens) if token in self._ends), best)
        return tokens[: end + 1]


def _kind(length: int) -> int:
    """The acceptance class of a match length."""
    return min(length.bit_length(), len(_PRIORS) - 1)


def _size(rows: int) -> int:
    """The duration class of a row count."""
    return next((i for i, most in enumerate(_ROWS) if rows <= most), len(_ROWS) - 1)
