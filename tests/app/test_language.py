"""The user's language: which it is, that its catalogue is whole, and that the terminal UI says nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import symtable
import sys
from collections import Counter
from collections.abc import Iterator
from gettext import GNUTranslations
from pathlib import Path

import pytest

from app.language import wanted
from app.tui.jobs import PHASES, UNITS
from tests.architecture import ROOT
from tests.catalogue import COUNTS, LANGUAGES, TABLES, file_of, sources, text_of, untranslated, updated

NOT_SHOWN = {
    "app/chat/prompts.py", "app/chat/tools.py", "app/conversation.py", "app/documents/formats.py",
    "app/documents/prompt.py", "app/documents/search.py", "app/history/markdown.py", "app/history/schema.py",
    "app/history/store.py", "app/tools/contents.py", "app/tools/pipe.py", "app/tools/web.py",
}  # fmt: skip
"""Modules with texts for models, for databases and exported files, and of other programs, or for their logs."""
NAMES = {
    "Esc", "PgUp", "PgDn", "bold underline", "Input", "TextArea", "ModelTable", "ToolTable", "Vert", "lowbit-chat",
    "ConEmuPID", "WezTerm", "Authorization", "Accept-Encoding", "State", "Role", "context length", "context size",
    "validation error", "Failed to parse JSON response: ", "this client has no such method",
    "Ctrl-C", "PCIe GB/s", "TextIO", "set enable-bracketed-paste on", "bind ^I rl_complete", "tab: complete",
    "notifications/initialized", "#setting-budget RadioSet, #settings TextArea", "http://host:8000/v1",
}  # fmt: skip
"""Names of keys, widgets and styles, and what is the same in every language."""
OTHER = re.compile(
    r"(k_chunk|n_tb|logit|KV|Bearer) [\0\d]|/attach \0|\0(search|rename|pin|delete|undo)$|(chats|args)\[\0\]$"
    r"|\s*(SELECT|INSERT|UPDATE|DELETE|PRAGMA|BEGIN) |\.(TH|SH|SS) |(chmod 700|unset|export) \0|[\0, ]+PCIe|\0 GiB"
)
"""Quantities, keys, SQL, roff and commands."""
SHOWING = {
    "Plain": 0,
    "Button": 0,
    "Choice": 0,
    "Box": 0,
    "Option": 0,
    "Links": 0,
    "CopyLink": 0,
    "notify": 0,
    "Binding": 2,
}
"""What shows a text, and which argument that is."""
MARKUP = re.compile(r"\[[^\]]*\]")
PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@pytest.mark.parametrize(
    ("environment", "languages"),
    [
        ({}, []),
        ({"LANG": "C.UTF-8"}, []),
        ({"LANG": "en_GB.UTF-8"}, []),
        ({"LANG": "de_DE.UTF-8"}, ["de_DE.UTF-8"]),
        ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "zh_CN"}, ["zh_CN"]),
        ({"LC_MESSAGES": "de", "LC_ALL": "POSIX"}, []),
        ({"LANG": "C", "LANGUAGE": "fr:de:en:zh_CN"}, ["fr", "de"]),
        ({"LANG": "de", "LC_ALL": ""}, ["de"]),
        ({"LANG": "enm"}, ["enm"]),
    ],
)
def test_the_environment_names_the_language(environment: dict[str, str], languages: list[str]) -> None:
    assert wanted(environment) == languages


def _said(language: str, code: str) -> str:
    environment = {**os.environ, "LANGUAGE": "", "LC_ALL": "", "LC_MESSAGES": "", "LANG": language}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, encoding="utf-8"
    )
    return done.stdout.strip()


def test_english_needs_no_catalogue() -> None:
    code = "import sys; from app.language import _; print(_('Quit'), 'gettext' in sys.modules)"
    assert _said("en_US.UTF-8", code) == "Quit False"
    assert _said("fr_FR.UTF-8", code) == "Quit True", "there is none"


ENGLISH_ONLY = """
import sys
from pathlib import Path
sys.argv, sys.stderr = ["lowbit-chat", "config", "get", "themme"], sys.stdout
from app.cli.start import main
try:
    main()
except SystemExit:
    from app.documents.reader import Reader
    try:
        list(Reader().read(Path({file!r})))
    except Exception as error:
        print(error)
"""


def test_the_command_line_and_its_processes_speak_english(tmp_path: Path) -> None:
    file = tmp_path / "binary.txt"
    file.write_bytes(b"a\0b")
    said = _said("de_DE.UTF-8", ENGLISH_ONLY.format(file=str(file)))
    assert said.splitlines() == [
        "lowbit-chat: unknown setting 'themme': did you mean theme?",
        "binary.txt is a binary file",
    ]


SCREEN = """
import asyncio
from app.settings import Settings
from app.tui.app import ChatApp
from app.tui.screens.chat_dialogs import OverflowDialog
from tests.app.tui.conftest import Runtime, Supervisor

async def main():
    runtime = Runtime()
    app = ChatApp(Settings(model="demo"), supervisor=lambda: Supervisor(runtime))
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("f3")
        await pilot.pause()
        for dialog in (None, OverflowDialog(3)):
            if dialog is not None:
                await app.push_screen(dialog)
                await pilot.pause()
            strips = app.screen._compositor.render_strips(app.screen.size)
            print(*("".join(segment.text for segment in strip) for strip in strips), sep="\\n")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("de_AT.UTF-8", ("Qualität und Geschwindigkeit", "○ andere", "lädt neu", "ältesten 3 Nachrichten", "Später")),
        ("zh_CN.UTF-8", ("质量与速度", "○ 自定义", "需重新加载", "最早的 3 条消息", "暂不")),
    ],
)
def test_the_screens_speak_it(language: str, words: tuple[str, ...]) -> None:
    screen = _said(language, SCREEN)
    assert [word for word in words if word not in screen] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_is_whole(language: str) -> None:
    catalogue, file = updated(language), file_of(language)
    assert untranslated(catalogue) == []
    assert file.read_bytes() == text_of(catalogue), "make catalogue"
    with file.with_suffix(".mo").open("rb") as stream:
        compiled = GNUTranslations(stream)
    for message in catalogue:
        if message.pluralizable:
            assert compiled.ngettext(*message.id, 2) == message.string[-1], "make catalogue"
        elif message.id:
            assert compiled.gettext(message.id) == message.string, "make catalogue"


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_keep_what_is_filled_in(language: str) -> None:
    for message in filter(lambda one: one.id, updated(language)):
        forms = message.string if message.pluralizable else (message.string,)
        texts = message.id if message.pluralizable else (message.id,)
        for form in filter(None, forms):
            assert any(_filled(form) == _filled(text) for text in texts), form


def _filled(text: str) -> Counter[str]:
    return Counter(
        [*PLACEHOLDER.findall(text), *(mark for mark in MARKUP.findall(text) if mark.startswith(("[@", "[/")))]
    )


def _literal(node: ast.AST) -> str | None:
    """A string's text; what an f-string fills in is a zero character."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _name(call: ast.Call) -> str:
    return (
        call.func.id
        if isinstance(call.func, ast.Name)
        else call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ""
    )


def escaped(source: str) -> Iterator[str]:
    """The texts of a module that a person would read, and that are not looked up."""
    tree = ast.parse(source)
    told, shown = set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told.add(node.value)  # a docstring
        elif isinstance(node, ast.Assert):
            told.add(node.msg or node)
        elif isinstance(node, ast.Subscript):
            told.update(ast.walk(node.slice))
        elif isinstance(node, ast.JoinedStr):
            told.update(node.values)
        elif isinstance(node, ast.Call):
            if _name(node) in (*COUNTS, "compile", "fullmatch"):
                told.update(part for argument in node.args for part in ast.walk(argument))
            told.update(part for one in node.keywords if one.arg in ("id", "classes") for part in ast.walk(one.value))
            if _name(node) in ("Option", "Argument"):  # of the command line, whose tree of commands is read
                told.update(part for one in node.keywords if one.arg in ("help", "metavar") for part in ast.walk(one.value))
            shown.update(one.value for one in node.keywords if one.arg in ("tooltip", "placeholder"))
            shown.update(node.args[SHOWING[_name(node)] :][:1] if _name(node) in SHOWING else ())
    for node in ast.walk(tree):
        text = None if node in told else _literal(node)
        if text is None or not re.search(r"[A-Za-z]{2,}", MARKUP.sub("", text)) or text in NAMES or OTHER.match(text):
            continue
        words = MARKUP.sub("", text)
        sentence = " " in words.strip() or re.match(r"[A-Z][a-z]", words)
        if (
            sentence
            or node in shown
            or (isinstance(node, ast.JoinedStr) and re.search(r"(^|[ \0])[a-z]{3,}([ \0]|$)", words))
        ):
            yield text


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""About."""\nx = "two words"', ["two words"]),
        ('x = _("two words"); y = d["two words"]; z = "key"', []),
        ('f"{count} queued"', ["\0 queued"]),
        ("f\"{count} · {_('queued')}\"", []),
        ('Plain("offer", classes="two words")', ["offer"]),
        ('Binding("f1", "help", "help", tooltip="keys")', ["help", "keys"]),
        ('f"[@click=stop]stop[/] ^T"', ["[@click=stop]stop[/] ^T"]),
    ],
)
def test_a_text_that_escapes_is_found(source: str, found: list[str]) -> None:
    assert sorted(escaped(source)) == sorted(found)


def test_no_text_of_the_screens_escapes() -> None:
    paths = sorted((ROOT / "app").rglob("*.py"))
    outside = {(str(path.relative_to(ROOT)), text) for path in paths for text in escaped(path.read_text())}
    outside -= {(file, text) for file, tabled in TABLES.items() for text in tabled}
    assert {(file, text) for file, text in outside if file not in NOT_SHOWN} == set()
    assert {file for file, _text in outside} == NOT_SHOWN, "the list is longer than it need be"


def test_the_steps_of_jobs_have_names_in_every_language() -> None:
    """The screens name the phases and units that are reported to them; those of the command line stay as they are."""
    said = "".join(path.read_text() for room in ("runtime", "models", "tuner") for path in (ROOT / room).rglob("*.py"))
    phases = set(re.findall(r'(?:phase=|_report\()"(\w+)"', said)) - {"eval", "export", "measure"}
    units = set(re.findall(r'unit="(\w+)"', said)) - {"bytes", "matrices"}
    assert phases <= PHASES.keys()
    assert units <= UNITS.keys()


def test_nothing_takes_the_name_of_the_function() -> None:
    """`name, _, rest = ...` in a function would make `_` a variable in all of it."""
    hidden = []
    for path in sources():
        tables = [symtable.symtable(path.read_text(), str(path), "exec")]
        while tables:
            table = tables.pop()
            tables += table.get_children()
            names = table.get_identifiers()
            plain = table.get_type() == "function" and not table.get_name().endswith(("comp", "genexpr", "lambda"))
            if plain and "_" in names and table.lookup("_").is_local():
                hidden.append(f"{path.name}: {table.get_name()}")
    assert hidden == []
