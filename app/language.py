"""The language of what the program shows: the user's, if `app/locale` has a catalogue of it, or English.

As gettext does, it goes by LANGUAGE, LC_ALL, LC_MESSAGES and LANG. Text is looked up where it is written, which for
tables and keys is at import, so a process has one language. `make catalogue` keeps the catalogues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gettext import NullTranslations

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
    """Speak English whatever the user's language is, as the command line does. To be called before anything is said."""
    global _english_only
    _english_only = True
    _catalogue.cache_clear()


@cache
def _catalogue() -> NullTranslations | None:
    """The catalogue of the user's language; None: English. Nothing is imported for that, so it starts no later."""
    languages = [] if _english_only else wanted(os.environ)
    if languages:
        from gettext import translation

        return translation(DOMAIN, FOLDER, languages, fallback=True)
    return None


def english() -> bool:
    """Whether the language is English, as of what the runtime, the tuner and the quantizers report."""
    return _catalogue() is None


def _(message: str, /, **values: object) -> str:
    """A text in the user's language.

    Args:
        message: The English text.
        **values: What its placeholders stand for, such as `{name}`. Without any, it is not a template.
    """
    catalogue = _catalogue()
    text = message if catalogue is None else catalogue.gettext(message)
    return text.format(**values) if values else text


def ngettext(one: str, many: str, count: int, /, **values: object) -> str:
    """A text in the user's language and in the right number; its placeholder `{count}` stands for the count."""
    catalogue = _catalogue()
    text = (one if count == 1 else many) if catalogue is None else catalogue.ngettext(one, many, count)
    return text.format(count=count, **values)
