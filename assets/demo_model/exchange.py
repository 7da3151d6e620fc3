"""One question with its answer, and the rule that says which questions are held out from training."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_PERCENT = 8
"""Share of the questions that training never sees."""

_POLITE_START = re.compile(r"^(please|hello|hi|hey|so|and|one question|tell me)\b ?")
_POLITE_END = re.compile(r" ?\b(please|demo)$")
_SIGNS = str.maketrans({"'": None, "×": "*", "÷": "/"})


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question and its answer."""

    group: str
    """Kind of knowledge, a key of `corpus.SHARES`."""
    topic: str
    """What the question is about, such as `budget`; questions of a topic have the same meaning."""
    ask: str
    """The question in its plain form."""
    answer: str
    """The answer."""
    key: str = ""
    """What decides the split; empty: the question's own words."""
    subject: str = ""
    """For facts, the word asked about, so that `And X?` can follow."""

    @cached_property
    def split(self) -> Split:
        """`held_out` for a fixed pseudo-random part of the questions, `train` for the others."""
        return split_of(self.key or question_key(self.ask))


def split_of(key: str) -> Split:
    """The split of a key: a hash decides."""
    digest = hashlib.sha256(key.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else "train"


def normalised(text: str) -> str:
    """Lower-case words of a text without punctuation, for finding duplicates; arithmetic signs stay."""
    return " ".join(re.findall(r"[a-z0-9_]+|[+*/-]", text.casefold().translate(_SIGNS)))


def question_key(text: str) -> str:
    """A question's words without polite beginnings and endings: `Hello, who are you?` and `Who are you` agree."""
    words = normalised(text)
    while True:
        shorter = _POLITE_END.sub("", _POLITE_START.sub("", words))
        if not shorter or shorter == words:
            return words
        words = shorter
