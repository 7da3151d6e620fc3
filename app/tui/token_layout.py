"""Tokens of a text, wrapped into lines with each cell's token known. Knows no widgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len

from app.tui.printable import printable

LINE_END = "⏎"
"""Stands where a token ends a line."""
TAB = "    "


@dataclass(frozen=True, slots=True)
class Run:
    """Cells of one line that belong to one token."""

    token: int
    text: str


def lay_out(texts: Sequence[str], width: int) -> list[list[Run]]:
    """Wrap a text between words, and inside a word that is longer than a line.

    Args:
        texts: what each token adds to the text.
        width: cells of a line, at least 2.
    """
    lines: list[list[tuple[int, str]]] = [[]]
    used = 0
    for word in _words(texts):
        cells = sum(cell_len(letter) for _, letter in word)
        if word[0][1] == "\n":
            lines[-1].append((word[0][0], LINE_END))
            lines.append([])
            used = 0
            continue
        if used and used + cells > width:
            lines.append([])
            used = 0
            if word[0][1] == " ":
                continue  # a space between two lines is not seen
        for token, letter in word:
            if used + cell_len(letter) > width:
                lines.append([])
                used = 0
            lines[-1].append((token, letter))
            used += cell_len(letter)
    return [_runs(line) for line in lines]


def _words(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Words, single spaces, line ends, and wide characters, which may be parted anywhere; letters with their token."""
    word: list[tuple[int, str]] = []
    for token, text in enumerate(texts):
        for letter in printable(text).replace("\t", TAB):
            if letter in " \n" or cell_len(letter) > 1:
                if word:
                    yield word
                    word = []
                yield [(token, letter)]
            else:
                word.append((token, letter))
    if word:
        yield word


def _runs(line: Sequence[tuple[int, str]]) -> list[Run]:
    return [
        Run(token, "".join(letter for _, letter in letters)) for token, letters in groupby(line, key=lambda one: one[0])
    ]
