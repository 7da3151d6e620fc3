"""The inspector's data on the tokens of an answer: heat, changes and drafts, as numbers and text.

All of it is computed by reading the answer again with the present settings; only the text was saved when the answer
was written. So every statement is about the present, not about what happened then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len, set_cell_size

from app.language import _, localized, ngettext, number
from app.printable import printable_name

if TYPE_CHECKING:
    from runtime.wire.requests import Candidate, InspectedToken, Inspection

View = Literal["certainty", "compensation", "drafts"]
HEATS = 5
"""Number of heat levels; 0 is none."""
SURE, LIKELY, UNSURE, RARE = 0.9, 0.5, 0.2, 0.05
"""Probabilities that separate the levels of certainty."""
MOVED = (0.02, 0.1, 0.25, 0.5)
"""Changes of probability by compensation that separate the levels."""
LEGENDS: dict[View, Sequence[str]] = {
    "certainty": ("≥ 90 %", "≥ 50 %", "≥ 20 %", "≥ 5 %", _("less")),
    "compensation": (_("same"), _("moved 2 %"), "10 %", "25 %", "50 %"),
    "drafts": (_("same token"), _("another token")),
}
TITLES: dict[View, str] = {
    "certainty": _("how sure the model was"),
    "compensation": _("what compensation changes"),
    "drafts": _("what a draft predicts"),
}


NOTE = _("Computed now, with the present settings. Only the text of the answer was saved.")


def views(told: Inspection) -> list[View]:
    """The available views of an answer."""
    found: list[View] = ["certainty"]
    if told.compensated:
        found.append("compensation")
    if any(token.draft is not None for token in told.tokens):
        found.append("drafts")
    return found


def chosen(token: InspectedToken) -> Candidate:
    """The chosen token among the candidates."""
    return token.candidates[token.chosen]


def changed(token: InspectedToken) -> bool:
    """Whether another token is the most likely one without compensation."""
    return token.base_best not in (None, 0)


def missed(token: InspectedToken) -> bool:
    """Whether a draft gives another token."""
    return token.draft is not None and token.draft != token.chosen


def heat(token: InspectedToken, view: View) -> int:
    """The heat level of a token, from 0 to `HEATS` - 1."""
    own = chosen(token)
    probability = own.probability or 0.0
    if view == "certainty":
        return sum(probability < least for least in (SURE, LIKELY, UNSURE, RARE))
    if view == "drafts":
        return HEATS - 2 if missed(token) else 0
    moved = abs(probability - (own.base_probability or 0.0)) if token.base_best is not None else 0.0
    return sum(moved >= least for least in MOVED)


def summary(told: Inspection) -> list[str]:
    """The answer in a few figures, most important first."""
    tokens = told.tokens
    counted = ngettext("{count:,} token", "{count:,} tokens", len(tokens))
    parts = [counted if told.complete else _("{tokens} (the beginning)", tokens=counted)]
    if told.compensated:
        count = sum(map(changed, tokens))
        parts.append(ngettext("compensation changes {count} choice", "compensation changes {count} choices", count))
    else:
        parts.append(_("compensation is off"))
    drafted = [token for token in tokens if token.draft is not None]
    if drafted:
        matching = sum(not missed(token) for token in drafted)
        parts.append(_("{matching} of {drafts} drafts match", matching=matching, drafts=len(drafted)))
    parts.append(_("{count} sure", count=sum(heat(token, "certainty") == 0 for token in tokens)))
    known = [one.probability for one in map(chosen, tokens) if one.probability]
    if known:
        parts.append(_("perplexity {perplexity:.2f}", perplexity=math.exp(-sum(map(math.log, known)) / len(known))))
    return parts


def shown(text: str) -> str:
    """A token in quotation marks, with invisible characters made visible."""
    return (
        f"“{printable_name(text.replace(chr(10), '⏎').replace(chr(9), '⇥'))}”" if text else _("a part of a character")
    )


def share(probability: float | None) -> str:
    """A probability: `81.3 %`, `< 0.1 %`."""
    if probability is None:
        return "–"
    return localized(f"{100 * probability:.1f} %" if probability >= 0.0005 else "< 0.1 %")


def verdicts(token: InspectedToken) -> list[str]:
    """What compensation and drafts change at a token, in sentences."""
    likeliest, own = token.candidates[0], chosen(token)
    found = []
    if token.base_best is not None:
        base = token.candidates[token.base_best]
        if changed(token):
            found.append(
                _(
                    "Compensation changes the choice: without it {before} is the most likely ({before_share}), "
                    "with it {text} ({share}).",
                    before=shown(base.text),
                    before_share=share(base.base_probability),
                    text=shown(likeliest.text),
                    share=share(likeliest.probability),
                )
            )
        else:
            found.append(_("Compensation does not change the choice."))
    if own is not likeliest:
        found.append(
            _(
                "Not the most likely token now; that is {text} ({share}).",
                text=shown(likeliest.text),
                share=share(likeliest.probability),
            )
        )
    if token.draft is not None:
        found.append(
            _("A draft predicts {text} instead.", text=shown(token.candidates[token.draft].text))
            if missed(token)
            else _("A draft predicts it too.")
        )
    return found


def candidate_rows(token: InspectedToken, width: int, most: int) -> list[str]:
    """The candidates as a table: probability and logit, with and without compensation."""
    compensated = token.base_best is not None
    columns = 2 if compensated else 1
    name = max(8, min(16, width // 4))
    bar = max(0, (width - name - 2) // columns - 18)
    heads = [_("with compensation"), _("without")] if compensated else [_("probability")]
    lines = [_cell("", name + 2) + "".join(_cell(f"{head}", 18 + bar) for head in heads)]
    for index in _shown_candidates(token, most - 1):
        one = token.candidates[index]
        mark = "▸ " if index == token.chosen else "· " if index == token.base_best else "  "
        pairs = [(one.probability, one.logit), (one.base_probability, one.base_logit)][:columns]
        cells = "".join(_figures(probability, logit, bar) for probability, logit in pairs)
        lines.append((_cell(mark + shown(one.text), name + 2) + cells).rstrip())
    return lines


def _shown_candidates(token: InspectedToken, most: int) -> list[int]:
    """Indices of the candidates that fit, in order: the best ones, and those mentioned elsewhere."""
    needed = {0, token.chosen, token.base_best, token.draft} - {None}
    others = [index for index in range(len(token.candidates)) if index not in needed]
    return sorted([*[index for index in needed if index is not None], *others[: max(0, most - len(needed))]])[:most]


def _figures(probability: float | None, logit: float | None, bar: int) -> str:
    told = "" if logit is None else number(logit, ".1f")
    return f"{share(probability):>7} {told:>6} {_cell(_bar(probability or 0.0, bar), bar)}   "


def _bar(part: float, width: int) -> str:
    """A bar with a resolution of an eighth of a cell."""
    eighths = round(8 * part * width)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _cell(text: str, width: int) -> str:
    return set_cell_size(text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…", width)
