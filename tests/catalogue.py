"""The catalogues of `app/locale`, made from what the program says, and compiled. `make catalogue` updates them.

A new text is then there without a translation, which a person writes into the `.po` file; a second run compiles it.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from typer.main import get_command

from app.cli.main import app
from app.cli.parser import helps
from app.language import DOMAIN, FOLDER
from app.presets import BUNDLED
from app.reports import PARSER, REPORTS, SYSTEM
from app.settings import RULES
from models.catalogue import CATALOGUE
from models.recipe import GOOD_FOR
from runtime.wire.answers import BASE, CONTINUES, State
from tests.architecture import ROOT

LANGUAGES = ("de", "zh_CN")
DATE = datetime(2026, 11, 29, tzinfo=UTC)
"""The date in compiled catalogues, always the same, so that the same texts make the same file."""
COUNTS = {"_": 1, "ngettext": 2}
"""The functions that look texts up, with how many they take."""
TABLES = {
    "models/catalogue.py": tuple(dict.fromkeys(model.good_for for model in CATALOGUE)),
    "models/recipe.py": tuple(GOOD_FOR.values()),
    "runtime/wire/answers.py": (BASE, CONTINUES, *get_args(State)),
    "app/reports.py": (*REPORTS, *PARSER, *SYSTEM),
    "app/cli/main.py": tuple(dict.fromkeys(told.help for told in helps(get_command(app)))),
    "app/cli/output.py": ("matrices",),
    "app/presets.py": (*BUNDLED, *BUNDLED.values()),
    "app/language.py": ("1,234.5",),
    "app/cli/doctor.py": ("home", "model", "cache"),
    "app/settings.py": (
        *(key.replace("_", " ") for key in RULES if key != "k_chunk"),
        *dict.fromkeys(choice for key, rule in RULES.items() if key != "kv" for choice in rule.choices),
    ),
}
"""Texts that are looked up by a value, by the file that has them."""


def sources() -> Iterator[Path]:
    """The modules that look texts up."""
    return (path for path in sorted((ROOT / "app").rglob("*.py")) if "from app.language import" in path.read_text())


def texts(path: Path) -> Iterator[str | tuple[str, ...]]:
    """What a module looks up: texts, or pairs of singular and plural. Babel's own reader sees none in f-strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (count := COUNTS.get(node.func.id)):
            found = [one.value for one in node.args[:count] if isinstance(one, ast.Constant)]
            if len(found) == count:
                yield found[0] if count == 1 else tuple(found)


def template() -> Catalog:
    """All texts, without translations."""
    found = Catalog(domain=DOMAIN, charset="utf-8", fuzzy=False)
    for path in sources():
        for message in texts(path):
            found.add(message, locations=[(str(path.relative_to(ROOT)), 0)])
    for file, tabled in TABLES.items():
        for text in tabled:
            found.add(text, locations=[(file, 0)])
    return found


def file_of(language: str) -> Path:
    """The catalogue of a language."""
    return FOLDER / language / "LC_MESSAGES" / f"{DOMAIN}.po"


def updated(language: str) -> Catalog:
    """The catalogue of a language with the texts of today; what is no longer said is gone."""
    file, today = file_of(language), template()
    before = read_po(io.BytesIO(file.read_bytes()), locale=language) if file.exists() else Catalog(locale=language)
    after = Catalog(
        locale=language, domain=DOMAIN, charset="utf-8", fuzzy=False, creation_date=DATE, revision_date=DATE
    )
    for message in today:
        if message.id:
            known = before.get(message.id)
            same = known is not None and known.pluralizable == message.pluralizable
            kept = after.add(message.id, known.string if same else None, locations=message.locations)
            kept.flags.clear()
    return after


def text_of(catalogue: Catalog) -> bytes:
    """A catalogue as a `.po` file, by source file: without dates and places, which change though no text does."""
    written = io.BytesIO()
    write_po(written, catalogue, width=0, no_location=True, sort_by_file=True, omit_header=True)
    head = {"Language": catalogue.locale_identifier, "Content-Type": "text/plain; charset=utf-8"}
    lines = [f'"{name}: {value}\\n"' for name, value in (*head.items(), ("Plural-Forms", catalogue.plural_forms))]
    return "\n".join(['msgid ""', 'msgstr ""', *lines, "", ""]).encode() + written.getvalue()


def compiled(catalogue: Catalog) -> bytes:
    """A catalogue as gettext reads it."""
    written = io.BytesIO()
    write_mo(written, catalogue)
    return written.getvalue()


def untranslated(catalogue: Catalog) -> list[str]:
    """The texts that lack a translation, or a form of it."""
    forms = {
        message.id: message.string if message.pluralizable else (message.string,) for message in catalogue if message.id
    }
    return [str(text) for text, found in forms.items() if not found or not all(found)]


def main() -> None:
    for language in LANGUAGES:
        catalogue, file = updated(language), file_of(language)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text_of(catalogue))
        file.with_suffix(".mo").write_bytes(compiled(catalogue))
        print(f"{file.relative_to(ROOT)}: {len(catalogue)} texts, {len(untranslated(catalogue))} without a translation")


if __name__ == "__main__":
    main()
