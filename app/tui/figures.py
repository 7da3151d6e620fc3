"""Numbers as people read them, and the lines that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len

from app.amounts import byte_count
from app.conversation import Statistics
from runtime.compensation import Compensation

SEPARATOR = " · "
TWO_LINES = 56
"""Cells from which on there is room for a second line under an answer."""


def token_count(count: int) -> str:
    """Tokens, rounded from a thousand on: `412`, `1.3k`, `8k`, `131k`."""
    if count < 1000:
        return str(count)
    thousands = count / 1000
    return (
        f"{thousands:.0f}k" if thousands >= 99.95 or abs(thousands - round(thousands)) < 0.05 else f"{thousands:.1f}k"
    )


def bit_count(bits: float) -> str:
    """Bits of a weight: `3-bit`, `3.5-bit`."""
    return f"{bits:g}-bit"


def k_chunk_text(k_chunk: Mapping[str, int] | int | None) -> str:
    """How many channels are compensated: `k_chunk 16`, `k_chunk 8–32` by layer type, nothing where there are none."""
    if k_chunk is None:
        return ""
    values = [k_chunk] if isinstance(k_chunk, int) else list(k_chunk.values())
    if not compensated(k_chunk):
        return ""
    low, high = min(values), max(values)
    return f"k_chunk {high}" if low == high else f"k_chunk {low}–{high}"


def compensated(k_chunk: Mapping[str, int] | int | None) -> bool:
    """Whether any channel is compensated."""
    return bool(k_chunk if isinstance(k_chunk, int) or k_chunk is None else any(k_chunk.values()))


def percent(value: float) -> str:
    """A share of the time: `4.2 %`, `0 %` for what is not even a twentieth of a percent."""
    text = f"{value:.1f}".removesuffix(".0")
    return f"{'0' if text == '-0' else text} %"


def budget_text(budget_percent: float | None) -> str:
    """How much slower a model may be: `budget 2.5 %`, `budget off`, nothing where there is none."""
    if budget_percent is None:
        return ""
    return f"budget {budget_percent:g} %" if budget_percent else "budget off"


def tuning_title(compensation: Compensation) -> str:
    """What applying a compensation to the model that runs is called."""
    budget = compensation.budget_percent
    if budget is None:
        return f"Applying k_chunk {compensation.k_chunk}"
    return f"Tuning for a budget of {budget:g} %" if budget else "Switching compensation off"


def statistics_parts(statistics: Statistics) -> list[str]:
    """The parts of the line under an answer, the most telling first."""
    about = "≈ " if statistics.estimated else ""
    parts = [f"{about}{statistics.tokens} token{'' if statistics.tokens == 1 else 's'}"]
    if statistics.tokens_per_s is not None:
        parts.append(f"{statistics.tokens_per_s:.1f} tok/s")
    if statistics.first_after_s is not None:
        parts.append(f"first after {statistics.first_after_s:.2f} s")
    if statistics.context_used is not None:
        of = "" if statistics.context is None else f" of {token_count(statistics.context)}"
        parts.append(f"context {token_count(statistics.context_used)}{of}")
    parts += [*compensation_parts(statistics), *speculation_parts(statistics)]
    if statistics.bits is not None:
        parts.append(bit_count(statistics.bits))
    if statistics.memory_bytes is not None:
        parts.append(byte_count(statistics.memory_bytes))
    return parts


def compensation_parts(statistics: Statistics) -> list[str]:
    """What was compensated and what that cost: `k_chunk 41–48`, `slowdown 4.2 %`, `first word 8.1 % later`."""
    chunk, slowdown, prompt = (
        k_chunk_text(statistics.k_chunk),
        statistics.slowdown_percent,
        statistics.prompt_slowdown_percent,
    )
    parts = [chunk] if chunk else []
    if chunk and slowdown is not None:
        parts.append(f"slowdown {percent(slowdown)}")
    if prompt is not None:
        parts.append(f"first word {percent(prompt)} later")
    return parts


def speculation_parts(statistics: Statistics) -> list[str]:
    """What speculation did: `drafts 87 % accepted`, `3.4 tokens a verify`; or that it did not pay."""
    if statistics.gamma is None:
        return []
    parts = []
    if statistics.tokens_per_verify:
        rate = statistics.acceptance_rate or 0.0
        parts = [f"drafts {100 * rate:.0f} % accepted", f"{statistics.tokens_per_verify:.1f} tokens a verify"]
    return parts if statistics.gamma else [*parts, "speculation did not pay"]


def statistics_lines(statistics: Statistics, width: int, before: Sequence[str] = ()) -> str:
    """The line under an answer; a second one where the compensation would not fit, but not in a slim terminal.

    Args:
        statistics: what the answer cost.
        width: cells of a line.
        before: words to begin with.
    """
    parts = [*before, *statistics_parts(statistics)]
    line = fitting(parts, width)
    wanted = compensation_parts(statistics)
    if not wanted or wanted[-1] in line.split(SEPARATOR) or width < TWO_LINES:
        return line
    rest = parts[len(line.split(SEPARATOR)) :] if line else parts
    return f"{line}\n{fitting(rest, width)}"


def fitting(parts: Sequence[str], width: int, separator: str = SEPARATOR) -> str:
    """As many of the parts, from the first on, as fit into `width` cells."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if cell_len(longer) > width:
            break
        line = longer
    return line
