"""Sanitizing of text that a terminal would interpret, or that misleads its reader."""

from __future__ import annotations

import unicodedata

import pytest
from rich.cells import cell_len

from app.printable import harmless, printable, printable_name

PERSIAN, HEBREW, FAMILY = "می\u200cخواهم", "(שלום!\u200f)", "👩\u200d👩\u200d👧 ❤\ufe0f"


def test_control_characters_are_shown_not_obeyed() -> None:
    text = "a\x1b[31m\r\nb\tc\x00\x7f\x9b\ud800 日本 🙂‍↔️"
    shown = printable(text)
    assert shown == "a␛[31m\nb\tc␀␡�� 日本 🙂‍↔️"
    shown.encode("utf-8")


@pytest.mark.parametrize("text", [PERSIAN, HEBREW, FAMILY, "مرحبا\u061c، e\u0301", "soft\u00adhyphen"], ids=ascii)
def test_prose_keeps_what_people_write(text: str) -> None:
    assert printable(text) == harmless(text) == text


def test_prose_turns_no_line_round_and_hides_nothing() -> None:
    turning = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u206a\u206f"
    assert printable(f"a{turning}b\u2028c\u2029d\U000e0041\U000e007f") == "ab\nc\nd"


@pytest.mark.parametrize(
    "twin",
    [
        "de\u200bmo",
        "de\u200dmo",
        "demo\u3164",
        "demo\ufe0f",
        "\u202edemo",
        "de\u00admo",
        "demo\u00a0",
        "demo\n",
        "\ufeffdemo",
    ],
    ids=ascii,
)
def test_no_two_names_look_the_same(twin: str) -> None:
    shown = printable_name(twin)
    assert shown != twin
    assert {"�", "␊"} & set(shown)
    assert printable_name("Qwen3 4B · наш · 日本") == "Qwen3 4B · наш · 日本"


def test_what_is_laid_out_keeps_its_cells() -> None:
    for code in (*range(0x300), *range(0x2000, 0x2100), 0xD800, 0xFEFF, *range(0xE0000, 0xE0080)):
        letter = chr(code)
        seen = harmless(f"a{letter}b")
        assert cell_len(seen) == cell_len(f"a{letter}b"), ascii(letter)
        assert unicodedata.category(letter) != "Cc" or seen == "ab", ascii(letter)
