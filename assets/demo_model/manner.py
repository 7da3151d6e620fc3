"""Typing as people do it: with a greeting, a remark, in lower case, without punctuation, with a typing error."""

from __future__ import annotations

import random
import re

from assets.demo_model.exchange import Exchange, question_key
from assets.demo_model.topics import words

_QUESTION = re.compile(
    r"^(What|How|Which|Who|Can|Could|Do|Does|Is|Are|Why|Where|When|Should|Tell|Explain|Describe|Define|Give|Name|Write"
    r"|Calculate|Add|Multiply|Divide|Count|I want|I need|I would|Please|Show|Help)\b",
    re.IGNORECASE,
)
_SHORT_FORMS = {"you": "u", "are": "r", "please": "pls", "what is": "whats", "what's": "whats", "thanks": "thx"}
_NEIGHBOURS = {
    "a": "s",
    "b": "v",
    "c": "x",
    "d": "f",
    "e": "r",
    "f": "g",
    "g": "h",
    "h": "j",
    "i": "o",
    "j": "k",
    "k": "l",
    "l": "k",
    "m": "n",
    "n": "m",
    "o": "p",
    "p": "o",
    "q": "w",
    "r": "t",
    "s": "d",
    "t": "r",
    "u": "i",
    "v": "b",
    "w": "e",
    "x": "c",
    "y": "u",
    "z": "x",
}
_GREETED = (("greet_hello", "Hello! "), ("greet_morning", "Good morning! "), ("greet_evening", "Good evening! "))


def casual(text: str) -> str:
    """The question as a hurried person types it: lower case, no final mark."""
    return re.sub(r"[.?!]$", "", text).lower()


def keywords(text: str) -> str:
    """The question without its small words, where two others or more remain."""
    kept = [word for word in text.split() if word.strip(".,?!").casefold() not in words("small_words")]
    return " ".join(kept) if len(kept) >= 2 else text


def slip(rng: random.Random, text: str) -> str:
    """The text with one letter of a longer word doubled, dropped, swapped or replaced by its neighbour's key."""
    places = [found.span() for found in re.finditer(r"[a-z]{5,}", text)]
    if not places:
        return text
    start, end = rng.choice(places)
    i = rng.randrange(start + 1, end - 1)
    changed = rng.choice(
        (text[i] * 2, "", text[i + 1] + text[i], _NEIGHBOURS[text[i]]),
    )
    after = i + 2 if len(changed) == 2 and changed[0] != changed[1] else i + 1
    return text[:i] + changed + text[after:]


def typed(rng: random.Random, turn: Exchange) -> Exchange:
    """A turn as a person may type it; what decides the split stays."""
    key = turn.key or question_key(turn.ask)
    ask, answer = turn.ask, turn.answer
    asks = bool(_QUESTION.match(ask))
    style = rng.random()
    if asks and style < 0.13:
        frames, reply = rng.choices(_GREETED, (8, 1, 1))[0]
        greeting = rng.choice(words(frames))
        ask, answer = greeting + _joined(greeting, ask), reply + answer
    elif asks and style < 0.28:
        start = rng.choice((*words("polite"), *words("before_question")))
        ask = start + _joined(start, ask)
    elif asks and style < 0.34 and ask[-1] in "?.":
        ask += rng.choice(words("after_question"))
    if rng.random() < 0.2:
        ask = casual(ask)
        if rng.random() < 0.3:
            for word, short in _SHORT_FORMS.items():
                ask = re.sub(rf"\b{word}\b", short, ask)
    elif rng.random() < 0.3:
        ask = re.sub(r"[.?!]$", "", ask) if ask[-1] in ".?!" else ask + rng.choice(".!")
    if turn.group == "program" and rng.random() < 0.14:
        ask = keywords(ask) if rng.random() < 0.5 else re.sub(r" (the|a|an|my)(?= )", "", ask)
    if turn.group in {"talk", "program"} and rng.random() < 0.1:
        ask = f"{rng.choice(words('fillers'))}{rng.choice((' ', ', ', ' ', '... '))}{ask}"
    if turn.group in {"talk", "program"} and rng.random() < 0.06:
        ask = re.sub(r"[.?!]$", "", ask) + rng.choice(("!!", "??", "...", "?!", "!!!", " :)", " lol", " :("))
    slips = rng.choices((0, 1, 2), (88, 10, 2))[0] if turn.group in {"talk", "program", "facts", "story"} else 0
    for _ in range(slips):
        ask = slip(rng, ask)
    return Exchange(group=turn.group, topic=turn.topic, ask=ask, answer=answer, key=key)


def joined(rng: random.Random, first: str, second: str) -> str:
    """Two questions as one message."""
    marked = first if first[-1] in ".?!" else f"{first}?"
    plain = re.sub(r"[.?!]+$", "", first)
    lower = second if second.startswith(("I ", "I'")) or second[:2].isupper() else second[0].lower() + second[1:]
    return rng.choice(
        (
            f"{marked} {second}",
            f"{marked} And {lower}",
            f"{plain} and {lower}",
            f"{plain}, and {lower}",
            f"{marked} Also, {lower}",
            f"Two questions: {plain}, and {lower}",
        )
    )


def _joined(start: str, text: str) -> str:
    """The question after its start: lower case after a comma, except for `I`."""
    return text if start.rstrip()[-1] in ".!" or text.startswith("I ") else text[0].lower() + text[1:]
