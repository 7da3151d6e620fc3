"""Text from outside, made safe to show: a terminal would obey control characters instead of showing them."""

from __future__ import annotations

_VISIBLE = (
    {code: 0x2400 + code for code in range(0x20)}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)
    | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): None}
)


def printable(text: str) -> str:
    """Replace control characters by their pictures, carriage returns by nothing, lone surrogates by U+FFFD."""
    return text.translate(_VISIBLE)
