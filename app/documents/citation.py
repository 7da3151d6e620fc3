"""Citations: the passages that an answer was given, by file and place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from app.conversation import Passage
from app.language import _, localized, ngettext, number

NOTHING = _("nothing about this was found in the documents, and the model was told so")


def place(passage: Passage) -> str:
    """Where a passage stands in its file: `lines 3–9`, `page 4`."""
    one = passage.first == passage.last
    where, count = (number(passage.first, ","), 1) if one else (localized(f"{passage.first:,}–{passage.last:,}"), 2)
    if passage.unit == "page":
        return ngettext("page {where}", "pages {where}", count, where=where)
    return ngettext("line {where}", "lines {where}", count, where=where)


def cited(passages: Sequence[Passage]) -> str:
    """Passages by file: `from book.md, lines 3–9, line 20; notes.pdf, page 4`."""
    if not passages:
        return NOTHING
    ordered = sorted(passages, key=lambda passage: (passage.file, passage.first))
    files = groupby(ordered, key=lambda passage: passage.file)
    places = "; ".join(f"{file}, {', '.join(map(place, found))}" for file, found in files)
    return _("from {places}", places=places)
