"""Line wrapping of a text that keeps track of each cell's token. Independent of widgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len

from app.printable import printable

LINE_END = "⏎"
"""Marks a token that ends a line."""
TAB = "    "


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent cells of one line that belong to one token."""

    token: int
    text: str


def lay_out(texts: Sequence[str], width: int) -> list[list[Run]]:
    """Wrap a text between words, and inside words that are longer than a line.

    Args:
        texts: the text of each token.
        width: width of a line in cells, at least 2.
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
                continue  # a space between two lines is invisible
        for token, letter in word:
            if used + cell_len(letter) > width:
                lines.append([])
                used = 0
            lines[-1].append((token, letter))
            used += cell_len(letter)
    return [_runs(line) for line in lines]


def _words(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Words, spaces, line ends and wide characters (which break anywhere), each as letters with their token."""
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
