"""Search: the passages that a question is about, by their words (BM25)."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TERMS = 24
"""Words of a question that are searched."""
MATCHES = 40
"""Passages that are returned at most."""
RANKED = 400
"""Passages with most of the question's information, which are ranked."""
COVERED = 0.4
"""Share of a question's information that a passage must contain: the sum of its words' idf over that of all words."""
_STOP_WORDS = """
a about after all also am an and any are as at be because been before being between but by can could did do does doing
don for from get had has have having he her here him his how i if in into is it its just me more most my no not of on or
other our out over own say said says she should so some such tell than that the their them then there these they this
those to too under up us use very was we were what when where which while who whom whose why will with would you your
please find explain describe give show list many much document documents file files text passage book according mention
mentioned
"""
STOP = frozenset(_STOP_WORDS.split())
"""Words that questions are made of, which say nothing about the subject."""
_OWN = "source IN (SELECT number FROM sources WHERE path IN (SELECT value FROM json_each(?)))"
_WORD = re.compile(r"\w+")
_FENCED = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
"""What was pasted or attached, which is not part of the question."""
_IDEOGRAPH = "\u2e80"
"""Scripts from this code point on have no spaces between words; they are searched by pairs of characters."""


@dataclass(frozen=True, slots=True)
class Match:
    """A passage that was found."""

    chunk: int
    """Its number."""
    covered: float
    """Share of the question's information that it contains, 0 to 1."""


def terms(question: str) -> list[str]:
    """The words of a question that say what it is about; in scripts without spaces, pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(question.casefold()):
        if any(letter >= _IDEOGRAPH for letter in word):
            found += [word[at : at + 2] for at in range(max(1, len(word) - 1))]
        elif word not in STOP and (len(word) > 1 or word.isdigit()):
            found.append(word)
    return list(dict.fromkeys(found))[:MAX_TERMS]


def subject(questions: Sequence[str]) -> list[str]:
    """The words of the last question that names a subject."""
    return next((words for question in reversed(questions) if (words := terms(_FENCED.sub("", question)))), [])


def best(database: sqlite3.Connection, paths: Sequence[str], words: Sequence[str]) -> list[Match]:
    """The passages of some sources that contain enough of these words, best first."""
    among = json.dumps(list(paths))
    ((total,),) = database.execute(f"SELECT count(*) FROM chunks WHERE {_OWN}", (among,)).fetchall()  # noqa: S608
    covered: dict[int, float] = {}
    whole = 0.0
    for word in words:
        hits = _hits(database, among, word)
        count = max(1, len(hits))  # a word that is nowhere counts as the rarest, not as rarer than any
        weight = math.log(1 + (total - count + 0.5) / (count + 0.5))
        whole += weight
        for (chunk,) in hits:
            covered[chunk] = covered.get(chunk, 0.0) + weight
    enough = sorted((chunk for chunk, part in covered.items() if part >= COVERED * whole), key=lambda c: -covered[c])
    ranks = _ranks(database, words, enough[:RANKED])
    enough = sorted(enough[:RANKED], key=lambda chunk: (ranks.get(chunk, 0.0), -covered[chunk]))
    return [Match(chunk, covered[chunk] / whole) for chunk in enough[:MATCHES]]


def _hits(database: sqlite3.Connection, paths: str, word: str) -> list[tuple[int]]:
    """The passages with a word."""
    if word[0] >= _IDEOGRAPH:
        return database.execute(f"SELECT number FROM chunks WHERE {_OWN} AND instr(text, ?)", (paths, word)).fetchall()  # noqa: S608
    query = (
        f"SELECT number FROM chunk_words JOIN chunks ON number = chunk_words.rowid WHERE chunk_words MATCH ? AND {_OWN}"  # noqa: S608
    )
    return database.execute(query, (f'"{word}"', paths)).fetchall()


def _ranks(database: sqlite3.Connection, words: Sequence[str], among: Sequence[int]) -> dict[int, float]:
    """BM25 of passages for any of these words; the lower, the better."""
    asked = " OR ".join(f'"{word}"' for word in words if word[0] < _IDEOGRAPH)
    if not asked:
        return {}
    query = (  # the plus keeps SQLite from running the whole query once for each of these rows
        "SELECT rowid, rank FROM chunk_words WHERE chunk_words MATCH ? AND +rowid IN (SELECT value FROM json_each(?))"
    )
    return dict(database.execute(query, (asked, json.dumps(among))).fetchall())
