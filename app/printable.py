"""Sanitizing of untrusted text: replaces control characters and characters that mislead the reader.

Prose (messages, errors, titles) and names (which identify things) are treated differently:

- Prose keeps invisible characters that people do write: joiners, without which Persian, Hindi and emoji break, and
  direction marks (U+200E, U+200F, U+061C), which affect only adjacent punctuation. Embeddings, overrides and isolates
  are removed, because each reorders the rest of its line, including the program's own words. Tags are removed,
  because they spell out invisible text.
- A name keeps only visible characters; all others become U+FFFD, so that different names never look the same.
"""

from __future__ import annotations

_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_C1 = range(0x80, 0xA0)
_SURROGATES = range(0xD800, 0xE000)
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x2070))
"""Bidirectional embeddings, overrides and isolates, and the deprecated formatting characters after them."""
_TAGS = range(0xE0000, 0xE0080)
_LINE_ENDS = (0x2028, 0x2029)
_BLANK = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x2800, 0x3164, *range(0xFE00, 0xFE10),
              0xFFA0, *range(0xE0100, 0xE01F0)))
)  # fmt: skip
"""Characters that Unicode counts as printable although they are invisible: fillers, variation selectors."""

_SHOWN = (
    _PICTURES
    | dict.fromkeys([*_C1, *_SURROGATES], 0xFFFD)
    | dict.fromkeys([*_TURNING, *_TAGS], None)
    | dict.fromkeys(_LINE_ENDS, "\n")
    | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): None}
)
_GONE = dict.fromkeys([*_PICTURES, *_C1, *_LINE_ENDS, *_TURNING, *_TAGS], None) | dict.fromkeys(_SURROGATES, 0xFFFD)


def printable(text: str) -> str:
    """Prose that is safe to show: control characters as symbols, without characters that reorder or hide text."""
    return text.translate(_SHOWN)


def printable_name(text: str) -> str:
    """A name that is safe to show: one line of visible characters."""
    return "".join(
        letter if letter.isprintable() and letter not in _BLANK else "\ufffd" for letter in text.translate(_PICTURES)
    )


def without_middle(text: str, width: int) -> str:
    """A text with `…` in place of its middle, so many cells wide: `Qwen3.5…Q8_0`."""
    from rich.cells import set_cell_size

    tail = (width - 1) // 2
    end = set_cell_size(text[::-1], tail)[::-1] if tail else ""
    return f"{set_cell_size(text, width - 1 - tail)}…{end}"


def cells(text: str) -> int:
    """The width of a text on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def harmless(text: str) -> str:
    """Laid-out text without the characters that `printable` replaces; its width in cells stays the same."""
    return text if text.isprintable() else text.translate(_GONE)
