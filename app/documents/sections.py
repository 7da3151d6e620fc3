"""Sections: the text of a document with the places that a reader can find again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from app.conversation import Unit

TARGET = 1000
"""Characters from which a passage ends at the next good place: about 250 tokens."""
MOST = 1500
"""Maximum length of a passage in characters."""


@dataclass(frozen=True, slots=True)
class Section:
    """Text of a document that begins at a place."""

    unit: Unit
    """What `first` counts."""
    first: int
    """Number of its first line, or of its page or paragraph."""
    text: str
    """In a section of lines, each line of the text is one more; otherwise all of it is at `first`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage that is found and quoted as a whole."""

    unit: Unit
    first: int
    last: int
    text: str


def whole(sections: Iterable[Section]) -> str:
    """The text of a document. Pages are separated by an empty line."""
    return "\n\n".join(section.text for section in sections)


def chunks(sections: Iterable[Section]) -> Iterator[Chunk]:
    """Cut a document into passages of at most `MOST` characters, at empty lines and headings where there are some.

    Args:
        sections: Its sections in order, all of one unit.
    """
    held: list[tuple[int, str]] = []
    size = 0
    unit: Unit = "line"
    for section in sections:
        unit = section.unit
        for number, line in _lines(section):
            ends = size + len(line) > MOST or (size >= TARGET and not line.strip())
            if held and (ends or (size >= TARGET // 2 and line.startswith("#"))):
                yield from _chunk(unit, held)
                held, size = [], 0
            held.append((number, line))
            size += len(line) + 1
    yield from _chunk(unit, held)


def _lines(section: Section) -> Iterator[tuple[int, str]]:
    """The lines of a section with their numbers; long ones in pieces."""
    for at, line in enumerate(section.text.split("\n")):
        number = section.first + at if section.unit == "line" else section.first
        begin = 0  # a place, rather than what is left: cutting that off again and again would copy it each time
        while len(line) - begin > MOST:
            end = line.rfind(" ", begin + TARGET, begin + MOST) + 1 or begin + MOST
            yield number, line[begin:end]
            begin = end
        yield number, line[begin:]


def _chunk(unit: Unit, held: list[tuple[int, str]]) -> Iterator[Chunk]:
    """A passage of these lines without empty ones around it; none if all are empty."""
    full = [at for at, (_, line) in enumerate(held) if line.strip()]
    if full:
        kept = held[full[0] : full[-1] + 1]
        yield Chunk(unit, kept[0][0], kept[-1][0], "\n".join(line for _, line in kept))
