"""Parts of a report in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.bench.reporting.verdicts import Verdict


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns of numbers stand to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    right = [bool(body) and all(_numeric(row[i]) for row in body) for i in range(len(head))]
    lines = [
        "| " + " | ".join(map(str, head)) + " |",
        "|" + "|".join("---:" if aligned else "---" for aligned in right) + "|",
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    return "\n".join(lines)


def _numeric(cell: str) -> bool:
    return not cell or cell.strip("*")[0].isdigit() or cell[0] in "+-−"


def number(perplexity: float) -> str:
    """Four or five figures, whatever the size."""
    return f"{perplexity:.2f}" if perplexity >= 20 else f"{perplexity:.3f}" if perplexity >= 3 else f"{perplexity:.4f}"


def between(text: str, name: str, content: str) -> str:
    """A text with what stands between two markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closing, after = rest.partition(end)
    if not (found and closing):
        raise ValueError(f"the markers {begin} and {end} are missing")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def legend() -> str:
    """What the signs of verdicts mean."""
    meanings = {
        Verdict.YES: "holds",
        Verdict.NO: "does not",
        Verdict.UNSURE: "the difference is within the noise",
        Verdict.NONE: "not measured or not applicable",
    }
    return ", ".join(f"{verdict.value} {meaning}" for verdict, meaning in meanings.items()) + "."
