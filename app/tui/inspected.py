"""What the inspector says of the tokens of an answer: heat, changes, drafts, in numbers and in words.

All of it is found when the answer is read again, with the settings of now; nothing but the text was kept when it was
written. So everything is told of the present, never of what happened then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len, set_cell_size

from app.tui.printable import printable

if TYPE_CHECKING:
    from runtime.wire.inspection import Candidate, InspectedToken, Inspection

View = Literal["certainty", "compensation", "drafts"]
HEATS = 5
"""Steps of heat, from 0, which is none."""
SURE, LIKELY, UNSURE, RARE = 0.9, 0.5, 0.2, 0.05
"""Probabilities that part the steps of certainty."""
MOVED = (0.02, 0.1, 0.25, 0.5)
"""Probabilities by which compensation moved a token, that part the steps."""
LEGENDS: dict[View, Sequence[str]] = {
    "certainty": ("≥ 90 %", "≥ 50 %", "≥ 20 %", "≥ 5 %", "less"),
    "compensation": ("same", "moved 2 %", "10 %", "25 %", "50 %"),
    "drafts": ("the same", "another token"),
}
TITLES: dict[View, str] = {
    "certainty": "how sure the model was",
    "compensation": "what compensation moves",
    "drafts": "what a draft guesses",
}


NOTE = "Read again now, with the present settings: of the answer itself only the text was kept."


def views(told: Inspection) -> list[View]:
    """The ways in which an answer can be looked at."""
    found: list[View] = ["certainty"]
    if told.compensated:
        found.append("compensation")
    if any(token.draft is not None for token in told.tokens):
        found.append("drafts")
    return found


def chosen(token: InspectedToken) -> Candidate:
    """The token among its candidates."""
    return token.candidates[token.chosen]


def changed(token: InspectedToken) -> bool:
    """Whether another token would have been the most likely one without compensation."""
    return token.base_best not in (None, 0)


def missed(token: InspectedToken) -> bool:
    """Whether a draft gives another token."""
    return token.draft is not None and token.draft != token.chosen


def heat(token: InspectedToken, view: View) -> int:
    """How much a token stands out, from 0 to `HEATS` - 1."""
    own = chosen(token)
    probability = own.probability or 0.0
    if view == "certainty":
        return sum(probability < least for least in (SURE, LIKELY, UNSURE, RARE))
    if view == "drafts":
        return HEATS - 2 if missed(token) else 0
    moved = abs(probability - (own.base_probability or 0.0)) if token.base_best is not None else 0.0
    return sum(moved >= least for least in MOVED)


def summary(told: Inspection) -> list[str]:
    """The answer in a few figures, the most telling first."""
    tokens = told.tokens
    parts = [f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}{'' if told.complete else ' (the beginning)'}"]
    if told.compensated:
        count = sum(map(changed, tokens))
        parts.append(f"compensation changes {count} choice{'' if count == 1 else 's'}")
    else:
        parts.append("nothing is compensated now")
    drafted = [token for token in tokens if token.draft is not None]
    if drafted:
        parts.append(f"{sum(not missed(token) for token in drafted)} of {len(drafted)} drafts the same")
    parts.append(f"{sum(heat(token, 'certainty') == 0 for token in tokens)} sure")
    known = [one.probability for one in map(chosen, tokens) if one.probability]
    if known:
        parts.append(f"perplexity {math.exp(-sum(map(math.log, known)) / len(known)):.2f}")
    return parts


def shown(text: str) -> str:
    """A token in quotation marks, with what can't be seen named."""
    return f"“{printable(text.replace(chr(10), '⏎').replace(chr(9), '⇥'))}”" if text else "a part of a character"


def share(probability: float | None) -> str:
    """A probability: `81.3 %`, `< 0.1 %`."""
    if probability is None:
        return "–"
    return f"{100 * probability:.1f} %" if probability >= 0.0005 else "< 0.1 %"


def verdicts(token: InspectedToken) -> list[str]:
    """What happened at a token, in sentences."""
    likeliest, own = token.candidates[0], chosen(token)
    found = []
    if token.base_best is not None:
        base = token.candidates[token.base_best]
        if changed(token):
            found.append(
                f"Compensation changes the choice: without it {shown(base.text)} is the likeliest "
                f"({share(base.base_probability)}), with it {shown(likeliest.text)} ({share(likeliest.probability)})."
            )
        else:
            found.append("Compensation leaves the choice as it is.")
    if own is not likeliest:
        found.append(
            f"Not the likeliest, as it is read now: that is {shown(likeliest.text)} ({share(likeliest.probability)})."
        )
    if token.draft is not None:
        found.append(
            f"A draft guesses {shown(token.candidates[token.draft].text)} instead."
            if missed(token)
            else "A draft guesses it, too."
        )
    return found


def candidate_rows(token: InspectedToken, width: int, most: int) -> list[str]:
    """The candidates as a table: probability and logit, with compensation and without.

    Args:
        token: whose.
        width: cells of a line.
        most: lines, head included.
    """
    compensated = token.base_best is not None
    columns = 2 if compensated else 1
    name = max(8, min(16, width // 4))
    bar = max(0, (width - name - 2) // columns - 18)
    heads = ["with compensation", "without"] if compensated else ["probability"]
    lines = [_cell("", name + 2) + "".join(_cell(f"{head}", 18 + bar) for head in heads)]
    for index in _told_first(token, most - 1):
        one = token.candidates[index]
        mark = "▸ " if index == token.chosen else "· " if index == token.base_best else "  "
        pairs = [(one.probability, one.logit), (one.base_probability, one.base_logit)][:columns]
        cells = "".join(_figures(probability, logit, bar) for probability, logit in pairs)
        lines.append((_cell(mark + shown(one.text), name + 2) + cells).rstrip())
    return lines


def _told_first(token: InspectedToken, most: int) -> list[int]:
    """The candidates that there is room for, in their order: the best ones, and those that something is said of."""
    needed = {0, token.chosen, token.base_best, token.draft} - {None}
    others = [index for index in range(len(token.candidates)) if index not in needed]
    return sorted([*[index for index in needed if index is not None], *others[: max(0, most - len(needed))]])[:most]


def _figures(probability: float | None, logit: float | None, bar: int) -> str:
    told = "" if logit is None else f"{logit:.1f}"
    return f"{share(probability):>7} {told:>6} {_cell(_bar(probability or 0.0, bar), bar)}   "


def _bar(part: float, width: int) -> str:
    """A bar in eighths of a cell."""
    eighths = round(8 * part * width)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _cell(text: str, width: int) -> str:
    return set_cell_size(text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…", width)
