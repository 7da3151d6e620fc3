"""The user's language: which it is, that its catalogue is whole, and that the program says nothing else."""

from __future__ import annotations

import ast
import errno
import json
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
import typer

from app.cli.parser import _wrapped
from app.language import wanted
from app.reports import PARSER, REPORTS, SYSTEM
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


COMMANDS = """
import sys
from app.cli.start import main
for line in {lines!r}:
    sys.argv, sys.stderr = ["lowbit-chat", *line.split()], sys.stdout
    try:
        main()
    except SystemExit as left:
        print(left.code)
"""


@pytest.mark.parametrize(
    ("language", "said"),
    [
        (
            "de_DE.UTF-8",
            (
                "lowbit-chat: unbekannte Einstellung 'themme': gemeint ist vielleicht theme?\n1",
                "Hilfe gibt es mit 'lowbit-chat eval -h'.\n\nFehler: Das Argument 'MODEL' fehlt.\n2",
                "Fehler: Ungültiger Wert für '--k-chunk': 9999 liegt nicht im Bereich 0<=x<=1024.\n2",
                "Fehler: Die Option '--format' fehlt. Zur Wahl:\n\tgguf,",
                "Fehler: Den Befehl 'lst' gibt es nicht. Gemeint ist vielleicht 'list', 'ls'?\n2",
                "Aufruf: lowbit-chat chats [OPTIONS]",
                "\n  Die Chats der Oberfläche auflisten, durchsuchen, exportieren und importieren;\n  ohne",
                "\n  -h, --help  Diese Hilfe anzeigen.\n\nBefehle:\n",
                "\nPerplexität nachher  2,04 (+2,8 %)\n",
                "lowbit-chat: /none lässt sich nicht lesen: Datei oder Ordner nicht gefunden\n1",
            ),
        ),
        (
            "zh_CN.UTF-8",
            (
                "错误：'--k-chunk' 的值无效：9999 不在范围 0<=x<=1024 内。\n2",
                "用法：lowbit-chat chats [OPTIONS]",
                "选项：\n  --json      向标准输出写一个 JSON 对象。\n",
                "\n量化后困惑度        2.04 (+2.8 %)\n",
            ),
        ),
    ],
)
def test_the_command_line_speaks_it(language: str, said: tuple[str, ...]) -> None:
    lines = ["config get themme", "eval", "run demo --k-chunk 9999", "export demo", "lst", "chats -h", "show demo"]
    told = _said(language, COMMANDS.format(lines=[*lines, "eval demo --text /none"]))
    assert [one for one in said if one not in told] == [], told


def test_what_programs_read_is_english() -> None:
    said = _said("de", COMMANDS.format(lines=["doctor --json", "rm demo --json"])).splitlines()
    assert "the CPU kernels use" in json.loads(said[0])["reason"]
    assert said[1:] == ["0", "lowbit-chat: the bundled model can't be removed: it is part of the program", "1"]


READER = """
from pathlib import Path
from app.documents.reader import Reader
from app.language import stay_english
for english in (False, True):
    if english:
        stay_english()
    try:
        list(Reader().read(Path({file!r})))
    except Exception as error:
        print(error)
"""


def test_the_process_that_reads_documents_speaks_it(tmp_path: Path) -> None:
    file = tmp_path / "binary.txt"
    file.write_bytes(b"a\0b")
    said = _said("de_DE.UTF-8", READER.format(file=str(file)))
    assert said.splitlines() == ["binary.txt ist eine Binärdatei", "binary.txt is a binary file"]


SAID = """
from app.amounts import byte_count
from app.cli.output import in_one_line
from app.language import _, number
from app.reports import reported
print(number(1234.5, ",.1f"), byte_count(4.93e9), _("{slower:.1f} % slower than without; k_chunk: {chosen}",
      slower=2.25, chosen="1.5"), number(7), sep="|")
for report in REPORTED:
    print(reported(report))
print(reported("a: b.", "-"), in_one_line(FileNotFoundError(2, "No such file or directory", "x")), sep="|")
hostile = "(weights , cache  for  tokens, buffers , margin " * 500
print(reported(hostile) == hostile)
"""
REPORTED = (
    "loading demo: 1.2 GB (weights 1.0 GB, residuals 2.5 MB, cache 3 MB for 1,024 tokens, buffers 1 MB, margin 9 MB)",
    (
        "the prompt has 2,000 tokens and the context holds 1,024, the answer included: shorten the conversation, or "
        "load the model with a longer context"
    ),
    "/x/manifest.json is damaged (its checksum does not match); quantize the model again",
    "no NVIDIA card was found; the CPU kernels use avx2",
    "loading demo took so long that nobody translated it",
)


@pytest.mark.parametrize(
    ("language", "said"),
    [
        (
            "en",
            (
                "1,234.5|4.9 GB|2.2 % slower than without; k_chunk: 1.5|7",
                *REPORTED,
                "a: b.|x: No such file or directory",
                "True",
            ),
        ),
        (
            "de",
            (
                "1.234,5|4,9 GB|2,2 % langsamer als ohne; k_chunk: 1.5|7",
                (
                    "demo wird geladen: 1,2 GB (Gewichte 1,0 GB, Residuen 2,5 MB, Cache 3 MB für 1.024 Token, Puffer "
                    "1 MB, Reserve 9 MB)"
                ),
                (
                    "die Eingabe hat 2.000 Token, in den Kontext passen 1.024, mit der Antwort: das Gespräch kürzen "
                    "oder das Modell mit längerem Kontext laden"
                ),
                "/x/manifest.json ist beschädigt (die Prüfsumme stimmt nicht); das Modell neu quantisieren",
                "keine NVIDIA-Karte gefunden; die CPU-Kernel nutzen avx2",
                REPORTED[-1],
                "-|x: Datei oder Ordner nicht gefunden",
                "True",
            ),
        ),
    ],
)
def test_numbers_and_reports_are_in_it(language: str, said: tuple[str, ...]) -> None:
    assert _said(language, f"REPORTED = {REPORTED!r}{SAID}").splitlines() == list(said)


def test_help_is_wrapped_by_cells() -> None:
    text = "列出已保存的模型，及其设备内存、主内存中的残差。MODEL and words"
    lines = f"    {_wrapped(text, 20, '  ', 4)}".splitlines()
    assert lines == ["    列出已保存的模", "  型，及其设备内存、", "  主内存中的残差。", "  MODEL and words"]
    assert _wrapped("one two three", 9, " ") == "one two\n three"


def _strings(path: Path) -> str:
    """The texts of a module, those of f-strings without what is filled in."""
    return "\n".join(filter(None, map(_literal, ast.walk(ast.parse(path.read_text())))))


def test_what_is_recognized_is_reported() -> None:
    rooms = [path for room in ("runtime", "models", "tuner") for path in (ROOT / room).rglob("*.py")]
    parser = Path(typer.__file__).parent.rglob("*.py")
    for templates, paths in ((REPORTS, rooms), (PARSER, parser)):
        modules = list(map(_strings, paths))
        for template in templates:
            parts = [part.strip(" ,.;:()'") for part in re.split(r"\{\w+(?:!r)?\}|, or ", template)]
            assert any(all(part in texts for part in parts) for texts in modules), template
    assert set(SYSTEM) <= set(map(os.strerror, errno.errorcode))


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
            told.update(node.args[:1] if _name(node) == "cast" else ())  # a type
            told.update(part for one in node.keywords if one.arg in ("id", "classes") for part in ast.walk(one.value))
            if _name(node) in ("Option", "Argument"):  # of the command line, whose tree of commands is read
                told.update(
                    part for one in node.keywords if one.arg in ("help", "metavar") for part in ast.walk(one.value)
                )
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
        ('cast("float | None", "two words")', ["two words"]),
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


TYPED = {"app/supervisor.py", "app/tui/screens/chat_dialogs.py", "app/tui/widgets/setting_row.py"}
"""Modules that write numbers for a field or another program to read."""


def test_no_number_of_the_screens_stays_english() -> None:
    """What an f-string formats is in English, unless it is handed to `localized`."""
    found = set()
    for path in sorted((ROOT / "app").rglob("*.py")):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) == "localized"]
        told = {part for call in calls for part in ast.walk(call)}
        for node in ast.walk(tree):
            form = node.format_spec if isinstance(node, ast.FormattedValue) and node not in told else None
            if form is not None and re.search(r",|\.[1-9]|g$", _literal(form) or ""):
                found.add(str(path.relative_to(ROOT)))
    assert found - NOT_SHOWN == TYPED


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
