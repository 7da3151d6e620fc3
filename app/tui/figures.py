"""Human-readable numbers, and the status lines made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len

from app.amounts import byte_count
from app.conversation import DRAFTS, Statistics
from app.language import _, localized, ngettext, number
from runtime.compensation import EXACT, Compensation, Exact

SEPARATOR = " · "


def token_count(count: int, of: int | None = None) -> str:
    """A token count, rounded above a thousand: `412`, `1.3k`, `8k`, `128k`.

    Args:
        count: Tokens.
        of: The context they are part of, whose unit they take; None: they are themselves one, or none.
    """
    if count < 1000:
        return str(count)
    thousands = count / (1024 if (count if of is None else of) % 1024 == 0 else 1000)  # as makers write contexts: 8k
    whole = thousands >= 99.95 or abs(thousands - round(thousands)) < 0.05
    return f"{number(thousands, '.0f' if whole else '.1f')}k"


def bit_count(bits: float) -> str:
    """Bits per weight: `3-bit`, `3.5-bit`."""
    return _("{bits:g}-bit", bits=bits)


def k_chunk_text(k_chunk: Mapping[str, int] | int | None) -> str:
    """The compensated channels: `k_chunk 16`, `k_chunk 8–32` if layer types differ, empty if there are none."""
    if k_chunk is None:
        return ""
    values = [k_chunk] if isinstance(k_chunk, int) else list(k_chunk.values())
    if not compensated(k_chunk):
        return ""
    low, high = min(values), max(values)
    return f"k_chunk {high}" if low == high else f"k_chunk {low}–{high}"


def setting_name(key: str) -> str:
    """A setting's name as people read it."""
    return key if key == "k_chunk" else _(key.replace("_", " "))


def compensated(k_chunk: Mapping[str, int] | int | None) -> bool:
    """Whether any channel is compensated."""
    return bool(k_chunk if isinstance(k_chunk, int) or k_chunk is None else any(k_chunk.values()))


def percent(value: float) -> str:
    """A percentage: `4.2 %`; below 0.05 % it is `0 %`."""
    text = format(value, ".1f").removesuffix(".0")
    return localized(f"{'0' if text == '-0' else text} %")


def rate(tokens_per_s: float) -> str:
    """A speed: `58.1 tok/s`, `4,070 tok/s`."""
    if tokens_per_s < 100:
        return _("{speed:.1f} tok/s", speed=tokens_per_s)
    return _("{speed:,.0f} tok/s", speed=tokens_per_s)


def share_words(share: float) -> str:
    """A share as one says it: `nearly all of`, `about a third of`, `a little of`."""
    if not 0.07 <= share < 0.93:
        return _("nearly all of") if share > 0.5 else _("a little of")
    names = {_("a tenth"): 0.1, _("a fifth"): 0.2, _("a quarter"): 0.25, _("a third"): 1 / 3, _("half"): 0.5,
             _("two thirds"): 2 / 3, _("three quarters"): 0.75}  # fmt: skip
    return _("about {part} of", part=min(names, key=lambda name: abs(names[name] - share)))


def budget_text(budget: float | Exact | None) -> str:
    """The budget: `budget 2.5 %`, `budget off`, `exact`, empty if there is none."""
    if budget is None:
        return ""
    if budget == EXACT:
        return _("exact")
    return _("budget {percent:g} %", percent=budget) if budget else _("budget off")


def tuning_title(compensation: Compensation) -> str:
    """The title of the job that applies a compensation to the running model."""
    budget = compensation.budget_percent
    if compensation.exact:
        return _("Loading the full-precision weights")
    if budget is None:
        return _("Applying k_chunk {k_chunk}", k_chunk=compensation.k_chunk)
    return _("Tuning for a budget of {budget:g} %", budget=budget) if budget else _("Switching compensation off")


def statistics_parts(statistics: Statistics) -> list[str]:
    """The parts of the line under an answer, most important first."""
    about = "≈ " if statistics.estimated else ""
    parts = [_("cut off: no more tokens fit or were allowed")] if statistics.cut else []
    parts += [_("stopped: it only repeated itself")] if statistics.looped else []
    parts.append(about + ngettext("{count} token", "{count} tokens", statistics.tokens))
    if statistics.tokens_per_s is not None:
        parts.append(rate(statistics.tokens_per_s))
    if statistics.first_after_s is not None:
        soon = statistics.first_after_s < 0.01
        parts.append(
            _("first token at once") if soon else _("first token after {time:.2f} s", time=statistics.first_after_s)
        )
    if statistics.context_used is not None:
        used = token_count(statistics.context_used, statistics.context)
        parts.append(
            _("context {used}", used=used)
            if statistics.context is None
            else _("context {used} of {context}", used=used, context=token_count(statistics.context))
        )
    return parts


def statistics_line(statistics: Statistics, width: int, before: Sequence[str] = ()) -> str:
    """The line under an answer."""
    return fitting([*before, *statistics_parts(statistics)], width)


def details(statistics: Statistics) -> list[str]:
    """Everything known about an answer's cost, as lines of text."""
    lines = []
    if statistics.left_out:
        lines.append(
            ngettext(
                "not read: the first message, which no longer fits in the context",
                "not read: the first {count} messages, which no longer fit in the context",
                statistics.left_out,
            )
        )
    if compensated(statistics.k_chunk):
        lines.append(
            _(
                "error compensation: {channels}, {slower}",
                channels=channels(statistics.k_chunk),
                slower=slower(statistics.slowdown_percent),
            )
        )
    elif statistics.k_chunk is not None:
        lines.append(_("error compensation: off"))
    if statistics.prompt_slowdown_percent is not None:
        late = statistics.prompt_slowdown_percent
        lines.append(
            _("compensated prompt: first word {percent} later", percent=percent(late))
            if late >= 0.05
            else _("compensated prompt: first word no later")
        )
    if did := speculation_parts(statistics):
        lines.append(_("speculation: {facts}", facts=_(", ").join(did)))
    held = [] if statistics.bits is None else [_("{bits} weights", bits=bit_count(statistics.bits))]
    if statistics.memory_bytes is not None:
        held.append(_("{size} of memory", size=byte_count(statistics.memory_bytes)))
    return [*lines, _(", ").join(held)] if held else lines


def channels(k_chunk: Mapping[str, int] | int | None) -> str:
    """The compensated channels in words: `41 to 48 of 1,024 channels (k_chunk)`."""
    return _("{number} of 1,024 channels (k_chunk)",
             number=k_chunk_text(k_chunk).removeprefix("k_chunk ").replace("–", _(" to ")))  # fmt: skip


def slower(slowdown_percent: float | None) -> str:
    """The slowdown from compensation in words; negative values are measurement noise."""
    if slowdown_percent is None:
        return _("cost not measured")
    return _("{percent} slower", percent=percent(slowdown_percent)) if slowdown_percent >= 0.05 else _("no slower")


def speculation_parts(statistics: Statistics) -> list[str]:
    """Speculation statistics: `87 % of copied drafts accepted`, `3.4 tokens per verify`; or that it was turned off."""
    if statistics.gamma is None:
        return []
    parts = []
    if statistics.tokens_per_verify:
        rate = statistics.acceptance_rate or 0.0
        drafts = DRAFTS.get(statistics.drafted_by or "", "drafts")
        parts = [
            _("{rate:.0f} % of {drafts} accepted", rate=100 * rate, drafts=drafts),
            _("{tokens:.1f} tokens per verify", tokens=statistics.tokens_per_verify),
        ]
    return parts if statistics.gamma else [*parts, _("turned off: no speedup")]


def fitting(parts: Sequence[str], width: int, separator: str = SEPARATOR) -> str:
    """The first parts that fit into `width` cells, joined."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if cell_len(longer) > width:
            break
        line = longer
    return line
