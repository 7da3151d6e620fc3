"""An index of a growing sequence of tokens that finds where its last tokens stood before.

Chains of equal n-grams, as in LZ77 compressors: a table has the last place of each n-gram, and each place knows the one
before with the same n-gram. A token costs a few table accesses. While the sequence repeats what stood elsewhere, no
search is needed: the place moves on with it.

Source: Deutsch 1996, RFC 1951 §4, for the chains; Saxena 2023, Prompt Lookup Decoding, for their use.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM = 3
"""Tokens that must be equal, at least."""
CANDIDATES = 8
"""Most places that a search compares, the latest first."""
LONGEST = 64
"""Tokens that a search compares at each place, at most."""


class SuffixIndex:
    """A sequence of tokens, and the place in it that its end repeats.

    Memory: some 200 bytes a token.

    Args:
        tokens: What the sequence begins with.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = list(tokens)
        first = self._tokens
        self._latest: dict[tuple[int, ...], int] = {}  # the end of each n-gram's last place
        self._before = [0] * min(NGRAM, len(first) + 1)  # at an end: the end of the place before, 0 for none
        for end, ngram in enumerate(zip(*(first[i:] for i in range(NGRAM)), strict=False), NGRAM):
            self._link(end, ngram)
        self._at = 0  # the end of the earlier place
        self.length = 0
        """How many of the last tokens stood somewhere before, as far as is known; 0 where fewer than `NGRAM` did."""
        self._search()

    def append(self, token: int) -> None:
        """Add a token."""
        tokens, at = self._tokens, self._at
        goes_on = self.length > 0 and tokens[at] == token
        tokens.append(token)
        self._link(len(tokens), tuple(tokens[-NGRAM:]))
        if goes_on:
            self._at, self.length = at + 1, self.length + 1
        else:
            self._search()

    def next(self) -> int:
        """The token that came next where the last tokens stood before. There must be a match."""
        return self._tokens[self._at]

    def continuation(self, count: int) -> list[int]:
        """`count` tokens that came next there. What would reach beyond the end goes on periodically."""
        found = self._tokens[self._at : self._at + count]
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found

    def _link(self, end: int, ngram: tuple[int, ...]) -> None:
        """Note that an n-gram ends here."""
        if end < NGRAM:
            self._before.append(0)
            return
        self._before.append(self._latest.get(ngram, 0))
        self._latest[ngram] = end

    def _search(self) -> None:
        """Find the longest match among the latest places of the last n-gram; of equals, the latest."""
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
