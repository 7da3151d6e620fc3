"""The language of what the program shows: the user's, if `app/locale` has a catalogue of it, or English.

As gettext does, it goes by LANGUAGE, LC_ALL, LC_MESSAGES and LANG. Text is looked up where it is written, which for
tables and keys is at import, so a process has one language. `make catalogue` keeps the catalogues.

What programs read is English: whoever writes JSON calls `stay_english`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gettext import NullTranslations
    from string import Formatter

DOMAIN = "lowbit_chat"
FOLDER = Path(__file__).parent / "locale"
_ENGLISH = ("en", "C", "POSIX")
_english_only = False


def wanted(environment: Mapping[str, str]) -> list[str]:
    """The languages that an environment asks for, in order, up to English, which needs no catalogue."""
    found = next((text for key in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG") if (text := environment.get(key))), "")
    languages: list[str] = []
    for language in filter(None, found.split(":")):
        if language.partition(".")[0].partition("_")[0] in _ENGLISH:
            break
        languages.append(language)
    return languages


def stay_english() -> None:
    """Speak English whatever the user's language is, for a reader that is a program."""
    global _english_only
    _english_only = True
    _catalogue.cache_clear()
    _signs.cache_clear()


@cache
def _catalogue() -> NullTranslations | None:
    """The catalogue of the user's language; None: English. Nothing is imported for that, so it starts no later."""
    languages = [] if _english_only else wanted(os.environ)
    if languages:
        from gettext import translation

        with suppress(OSError):  # there is none
            return translation(DOMAIN, FOLDER, languages)
    return None


def english() -> bool:
    """Whether the language is English, in which the runtime, the tuner and the models report."""
    return _catalogue() is None


def use_for_parser() -> None:
    """Let gettext's own functions, which the parser of the command line calls, find our catalogue."""
    from gettext import bindtextdomain, textdomain

    bindtextdomain(DOMAIN, str(FOLDER))
    textdomain(DOMAIN)


def in_all_languages(message: str) -> Iterator[str]:
    """A text in every language that there is, English first."""
    from gettext import translation

    yield message
    for folder in sorted(FOLDER.iterdir()):
        yield translation(DOMAIN, FOLDER, [folder.name]).gettext(message)


def _(message: str, /, **values: object) -> str:
    """A text in the user's language; without values for its placeholders, such as `{name}`, it is not a template."""
    catalogue = _catalogue()
    return _filled(message if catalogue is None else catalogue.gettext(message), values)


def ngettext(one: str, many: str, count: int, /, **values: object) -> str:
    """A text in the user's language and in the right number; its placeholder `{count}` stands for the count."""
    catalogue = _catalogue()
    text = (one if count == 1 else many) if catalogue is None else catalogue.ngettext(one, many, count)
    return _filled(text, {"count": count, **values})


def number(value: float, form: str = "") -> str:
    """A number as the user's language writes it.

    Args:
        value: The number.
        form: Its format, as of `format`: `,` is replaced by the sign between thousands, `.` by that of decimals.
    """
    return localized(format(value, form))


def localized(written: str) -> str:
    """A text whose commas and points belong to numbers, as the user's language writes them."""
    return written if english() else written.translate(_signs())


@cache
def _signs() -> dict[int, str]:
    example = _("1,234.5")
    return {ord(","): example[1], ord("."): example[-2]}


def _filled(text: str, values: Mapping[str, object]) -> str:
    if not values or english():
        return text.format(**values) if values else text
    return _formatter().vformat(text, (), values)


@cache
def _formatter() -> Formatter:
    from string import Formatter

    class Localized(Formatter):
        def format_field(self, value: Any, format_spec: str) -> str:
            written = format(value, format_spec)
            return localized(written) if isinstance(value, (int, float)) else written

    return Localized()
