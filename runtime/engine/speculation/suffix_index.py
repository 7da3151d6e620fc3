"""Suffix index: finds the last tokens of a growing sequence earlier in it.

It keeps chains of equal n-grams, as LZ77 compressors do: a table holds the latest position of each n-gram, and each
position links to the previous one with the same n-gram. A token costs a few table accesses. While the sequence keeps
repeating, no search is needed: the match simply advances.

Source: Deutsch 1996, RFC 1951 §4, for the chains; Saxena 2023, Prompt Lookup Decoding, for their use.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM = 3
"""Shortest match, in tokens."""
CANDIDATES = 8
"""Most positions that a search compares, latest first."""
LONGEST = 64
"""Most tokens compared at each position."""


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
        """The token that followed the match. There must be one."""
        return self._tokens[self._at]

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens that followed the match, repeated periodically beyond the end."""
        found = self._tokens[self._at : self._at + count]
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found

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
