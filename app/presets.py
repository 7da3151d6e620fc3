"""System prompt presets: named system prompts that a chat can use.

Some are built in. The first change writes all of them to `presets.toml`, next to the settings: one line per preset,
with its name and text, which can be edited by hand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from app import paths
from app.language import _, in_all_languages
from app.settings import SettingsError

MAX_NAME = 40
"""Maximum length of a name in characters."""
BUNDLED: Mapping[str, str] = {
    "Brief": (
        "Answer in as few words as the question allows. No introduction, no summary, no advice nobody asked for."
    ),
    "Coder": (
        "You are an experienced programmer. Give working code first, in a fenced block with its language, then at "
        "most three sentences on what is not obvious. Say so when you are not sure that something exists."
    ),
    "Editor": (
        "Correct spelling, grammar and style of the text that is sent, keep its meaning, tone and language, and "
        "answer with the corrected text alone."
    ),
    "Explainer": (
        "Explain step by step to somebody who is new to the subject. Use one everyday example, name each term "
        "before you use it, and end with one question that checks whether it was understood."
    ),
    "Reviewer": (
        "Review the change or text that is sent. List what is wrong or risky, the most serious first, each "
        "with its place and a fix. Do not praise. If nothing is wrong, say that in one sentence."
    ),
    "Summary": (
        "Summarize the text that is sent in at most five points, in its own language, with names and numbers as "
        "they stand there. Add nothing."
    ),
    "Translator": (
        "Translate the text that is sent into English, or into the language that is named, keep its tone and "
        "its formatting, and answer with the translation alone."
    ),
}
"""The built-in presets, in English."""


def name_problem(name: str) -> str | None:
    """Why a name is invalid, in words; None if it is valid."""
    if not name.strip():
        return _("A preset needs a name.")
    if len(name) > MAX_NAME or not name.isprintable():
        return _("A name is one line of at most {most} characters.", most=MAX_NAME)
    return None


def load(file: Path | None = None) -> dict[str, str]:
    """The presets by name, sorted. Built-in ones that nobody has changed are in the user's language.

    Args:
        file: the file, by default `paths.presets_file()`. If it doesn't exist, the built-in presets are returned.

    Raises:
        SettingsError: it can't be read, or is malformed.
    """
    file = file or paths.presets_file()
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = dict(BUNDLED)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(_("cannot read the presets {file}: {error}", file=file, error=error)) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(
            _("the presets {file} are not valid TOML: {error}; correct or delete the file", file=file, error=error)
        ) from error
    for name, text in found.items():
        if not isinstance(text, str):
            raise SettingsError(
                _(
                    "the presets {file} contain {name!r}, which is not text; correct or delete the file",
                    file=file,
                    name=name,
                )
            )
    bundled = _bundled()
    today = [pair if (told := bundled.get(pair, pair))[0] in found else told for pair in found.items()]
    return dict(sorted(today, key=lambda one: one[0].casefold()))


def _bundled() -> dict[tuple[str, str], tuple[str, str]]:
    """The built-in presets in the user's language, by what they are in any."""
    return {
        pair: (_(name), _(text))
        for name, text in BUNDLED.items()
        for pair in zip(in_all_languages(name), in_all_languages(text), strict=True)
    }


def save(presets: Mapping[str, str], file: Path | None = None) -> None:
    """Replace all presets atomically.

    Raises:
        SettingsError: it can't be written.
    """
    import tomlkit

    file = file or paths.presets_file()
    document = tomlkit.document()
    for name, text in presets.items():
        document.add(tomlkit.key([name]) if "." in name else name, tomlkit.string(text, multiline="\n" in text))
    try:
        paths.write_atomically(file.resolve(), tomlkit.dumps(document))
    except OSError as error:
        raise SettingsError(_("cannot write the presets {file}: {error}", file=file, error=error)) from error
