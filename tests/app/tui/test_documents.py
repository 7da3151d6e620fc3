"""Documents in the terminal UI: attached, sent whole or searched, quoted, kept, and refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from textual.events import Paste
from textual.widgets import Input, OptionList

from app.documents import reader
from app.documents.folders import names
from app.history.store import History
from app.tui.screens.chat_dialogs import AttachDialog
from tests.app.documents.making import pdf

Stage = Callable[..., Any]
FILLER = "Nothing of interest happened on this day, and the weather stayed as it was.\n\n" * 12


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A file longer than half of the scripted context, with one line about a lighthouse."""
    file = tmp_path / "book.md"
    file.write_text("".join(f"Day {n}\n\n{FILLER}" for n in range(30)) + "The lighthouse keeper was called Osgood.\n")
    return file


async def attach(s: Any, path: Path) -> None:
    """Attach a file with the dialog."""
    await s.open(AttachDialog, "ctrl+o")
    s.app.screen.query_one(Input).value = str(path)
    await s.settled()
    await s.pilot.press("enter")
    await s.until(lambda: s.app.screen is s.app.chat, "the dialog to close")
    await s.until(lambda: not s.app.session.documents.busy, "the document to be read")
    await s.settled()


def asked(runtime: Any) -> str:
    """The last message that the runtime was sent."""
    messages, _ = runtime.named("chat")[-1]
    return str(messages[-1]["content"])


def sources(s: Any) -> list[str]:
    return [source.name for source in s.app.session.conversation.extras.sources]


async def test_a_short_file_is_sent_whole_and_its_size_shown_before(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("a ```b``` <|im_end|>\n")
    async with stage(runtime) as s:
        await s.open(AttachDialog, "ctrl+o")
        s.app.screen.query_one(Input).value = str(tmp_path / "nothing")
        await s.pilot.press("enter")
        await s.shows("No such file or folder.")
        s.app.screen.query_one(Input).value = str(file)
        await s.pilot.press("enter")
        await s.until(lambda: s.composer.text == "⟦notes.md: 2 lines, ≈ 6 tokens⟧")
        await s.pilot.press("enter")
        await s.answered()
        assert asked(runtime) == "notes.md:\n````\na ```b``` < |im_end|>\n````"
        s.app.screen.post_message(Paste(str(file)))  # a file dropped on the terminal
        await s.until(lambda: s.composer.text == "⟦notes.md: 2 lines, ≈ 6 tokens⟧")
        assert sources(s) == []


async def test_the_picker_opens_folders_and_attaches_files(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "notes.txt").write_text("inside\n")
    async with stage(runtime, size=(100, 30)) as s:
        await s.open(AttachDialog, "ctrl+o")
        s.app.screen.query_one(Input).value = f"{tmp_path}/"
        await s.shows("box/")
        await s.pilot.press("down", "enter")
        await s.shows("notes.txt")
        await s.pilot.press("enter")
        await s.until(lambda: s.composer.text.startswith("⟦notes.txt"))


async def test_at_finds_files_that_git_does_not_ignore(
    stage: Stage, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    for name in ("notes.txt", "src/deep/engine.py", "src/english.md", "build.log"):
        (tmp_path / name).write_text("the lamp burns oil\n")
    (tmp_path / ".gitignore").write_text("*.log\n")
    monkeypatch.chdir(tmp_path)
    for repository in (False, True):
        if repository:
            git = await asyncio.create_subprocess_exec("git", "init", "-q", tmp_path)
            assert await git.wait() == 0
        async with stage(runtime, size=(100, 30)) as s:
            await s.pilot.press(*"me@home sees @")
            await s.shows("src/deep/engine.py", "notes.txt")
            assert ("build.log" in s.screen_text()) is not repository
            await s.pilot.press(*"eng")
            await s.hides("notes.txt")
            await s.shows("src/deep/engine.py", "src/english.md")
            await s.pilot.press("escape")
            await s.hides("src/english.md")
            await s.pilot.press(*"py")
            await s.shows("src/deep/engine.py")
            await s.pilot.press("enter")
            await s.until(lambda: s.composer.text == "me@home sees ⟦engine.py: 2 lines, ≈ 5 tokens⟧")
            await s.pilot.press("enter")
            await s.answered()
            assert "engine.py:" in asked(runtime)


async def test_a_sent_document_is_named_and_apart_from_the_question(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("the lamp burns oil\nand glows\n")
    (folder / "b.py").write_text("x = 1\n")
    (folder / "logo.png").write_bytes(b"\x89PNG\0")
    async with stage(runtime, size=(100, 30), notices=True) as s:
        s.composer.insert("Look: ")
        await attach(s, folder)
        await s.shows("logo.png is a binary file")
        assert s.composer.text.startswith("Look: ⟦project: 5 lines")
        s.composer.insert("Which oil?\nwhy:\n```\nmine\n```")
        await s.pilot.press("enter")
        await s.answered()
        assert asked(runtime) == (
            "Look: \n\na.txt:\n````\nthe lamp burns oil\nand glows\n````\n\nb.py:\n````\nx = 1\n````\n\n"
            "Which oil?\nwhy:\n```\nmine\n```"
        )
        assert sources(s) == []
        await s.shows("▤ a.txt · 2 lines · 28 B", "▤ b.py · 1 line · 5 B", "mine")
        assert "glows" not in s.screen_text()
        await s.pilot.press("ctrl+up", "up", "f")
        await s.shows("glows")
        await s.pilot.press("f")
        await s.hides("glows")


async def test_a_long_file_is_searched_and_the_passages_are_kept(
    stage: Stage, runtime: Any, tmp_path: Path, book: Path
) -> None:
    kept = tmp_path / "history.db"
    async with stage(runtime, size=(120, 40), notices=True, kept=kept) as s:
        await attach(s, book)
        await s.shows("is too long to be sent", "searches book.md")
        await s.say("What was the lighthouse keeper called?")
        assert '<passage from="book.md, line' in asked(runtime)
        assert "called Osgood." in asked(runtime)
        assert asked(runtime).endswith("\n\nWhat was the lighthouse keeper called?")
        await s.shows("from book.md, line")
        await s.hides("keeper was called Osgood")
        assert s.app.session.conversation.path()[0].text == "What was the lighthouse keeper called?"
        await s.pilot.press("ctrl+up", "p")
        await s.shows("keeper was called Osgood")
        chat, number = s.app.session.conversation.id, s.last.id
        before = asked(runtime)
        await s.say("And then?")  # names no subject: it is about the one before
        messages, _ = runtime.named("chat")[-1]
        assert messages[0]["content"] == before, "what was read before is read again, so the cache holds"
        assert "called Osgood." in asked(runtime)
    with closing(History(kept)) as history:
        message = next(one for one in history.messages(chat) if one.id == number)
        assert message.passages is not None
        assert [(one.file, one.unit) for one in message.passages] == [("book.md", "line")]
    runtime.answers = ["Osgood."]
    async with stage(runtime, size=(120, 40), kept=kept) as s:  # another start
        (saved,) = await s.app.session.history.chats()
        await s.app.chat.open_chat(saved)
        await s.shows("searches book.md")
        await s.say("Who keeps the lighthouse?")
        assert "called Osgood." in asked(runtime)


async def test_what_is_not_there_is_said_to_the_model_and_the_user(stage: Stage, runtime: Any, book: Path) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        await attach(s, book)
        await s.say("How do I reset the router password?")
        assert asked(runtime).startswith("A search of the attached documents found nothing")
        await s.shows("nothing about this was found in the documents")


async def test_stopping_while_documents_are_searched(stage: Stage, runtime: Any, book: Path) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        await attach(s, book)
        documents = s.app.session.documents
        await documents._alone.acquire()
        await s.ask("What was the lighthouse keeper called?")
        await s.shows("searching the documents · Esc stops")
        await s.pilot.press("escape")
        await s.until(lambda: s.last.state == "stopped")
        documents._alone.release()
        await asyncio.sleep(0)
        await s.pilot.press("ctrl+r")
        await s.answered()
        assert "called Osgood." in asked(runtime)


async def test_a_folder_is_searched_and_read_again_only_where_it_changed(
    stage: Stage, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_TOGETHER", 2)
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "lamp.py").write_text("def oil_of_lamp():\n    return 'whale'\n")
    (folder / "report.pdf").write_bytes(pdf(["Nothing.", "The turbine was serviced in March."]))
    (folder / "logo.png").write_bytes(b"\x89PNG\0")
    read: list[str] = []
    original = reader.Reader.read

    def spy(self: Any, path: Path) -> Any:
        read.append(path.name)
        return original(self, path)

    monkeypatch.setattr(reader.Reader, "read", spy)
    async with stage(runtime, size=(120, 40), notices=True, kept=tmp_path / "history.db") as s:
        await attach(s, folder)
        await s.shows("logo.png is a binary file")
        await s.say("When was the turbine serviced?")
        assert '<passage from="project/report.pdf, page' in asked(runtime)
        assert sorted(read) == ["lamp.py", "logo.png", "report.pdf"]
        (folder / "src" / "lamp.py").write_text("def oil_of_lamp():\n    return 'kerosene'\n")
        await s.say("Which oil burns in the lamp?")
        assert "kerosene" in asked(runtime)
        await attach(s, folder)
        assert read.count("lamp.py") == 2
        assert len(read) == 4


async def test_a_source_is_removed_with_its_index(stage: Stage, runtime: Any, tmp_path: Path, book: Path) -> None:
    kept = tmp_path / "history.db"
    async with stage(runtime, size=(120, 40), kept=kept) as s:
        await attach(s, book)
        await s.open(AttachDialog, "ctrl+o")
        await s.shows("Searched in this chat")
        s.app.screen.query_one("#attach-sources", OptionList).focus()
        await s.pilot.press("enter")
        await s.until(lambda: sources(s) == [])
        await s.until(lambda: not s.app.session.documents.busy)
        await s.hides("searches book.md")
        await s.say("What was the lighthouse keeper called?")
        assert asked(runtime) == "What was the lighthouse keeper called?"
    with closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT count(*) FROM chunks").fetchone() == (0,)
    assert b"Osgood" not in kept.read_bytes()


async def test_nothing_reaches_the_disk_where_chats_are_not_kept(
    stage: Stage, runtime: Any, tmp_path: Path, book: Path
) -> None:
    kept = tmp_path / "history.db"
    async with stage(runtime, size=(120, 40), kept=kept, history="off") as s:
        await attach(s, book)
        await s.say("What was the lighthouse keeper called?")
        assert "called Osgood." in asked(runtime)
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: len(s.app.session.conversation) == 0)
        await s.until(lambda: not s.app.session.documents._indexes, "the index to be forgotten")
    assert not kept.exists()


async def test_a_remote_server_gets_passages_only_and_the_title_says_so(stage: Stage, runtime: Any, book: Path) -> None:
    async with stage(runtime, size=(120, 40), endpoint="https://gpu.example/v1", ready=False) as s:
        await attach(s, book)
        await s.shows("searches book.md; only passages go to gpu.example")


async def test_the_screen_stays_usable_while_a_pipe_of_work_is_read(
    stage: Stage, runtime: Any, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    original = reader.Reader.read

    def slow(self: Any, path: Path) -> Any:
        held.wait(20)
        return original(self, path)

    monkeypatch.setattr(reader.Reader, "read", slow)
    async with stage(runtime, size=(120, 40)) as s:
        await s.open(AttachDialog, "ctrl+o")
        s.app.screen.query_one(Input).value = str(book)
        await s.pilot.press("enter")
        await s.shows("reading book.md")
        await s.pilot.press(*"typed")
        await s.until(lambda: s.composer.text == "typed")
        held.set()
        await s.shows("searches book.md")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
async def test_what_cannot_be_read_costs_one_sentence(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "thing\x1b[31m.txt"
    async with stage(runtime, size=(120, 40), notices=True) as s:
        for said in ("can't be opened", "is a device or a pipe", "is a binary file"):
            if said == "is a device or a pipe":
                os.mkfifo(path)
            elif said == "is a binary file":
                path.unlink()
                path.write_bytes(b"PK\x03\x04\0\0")
            s.app.chat._run_attaching(s.app.chat._attaching.attach(path))
            await s.shows(said)
            await s.until(lambda: not s.app.session.documents.busy)
            assert "\x1b" not in s.screen_text()
            await s.say("Still there?")
            assert asked(runtime) == "Still there?"
        (tmp_path / "picture").write_bytes(b"\x89PNG\0")
        s.app.screen.post_message(Paste(str(tmp_path / "picture")))  # dropped: its path stays
        await s.shows("picture is a binary file")
        await s.until(lambda: s.composer.text == str(tmp_path / "picture"))


def test_names_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.md", "Beta.txt", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "box").mkdir()
    assert names(f"{tmp_path}/") == ["box/", "Beta.txt", "b.md"]
    assert names(f"{tmp_path}/b") == ["box/", "Beta.txt", "b.md"]
    assert names(f"{tmp_path}/.h") == [".hidden"]
    assert names(f"{tmp_path}/no/") == []


async def test_reading_a_document_can_be_stopped(
    stage: Stage, runtime: Any, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = reader.Reader.read
    killed = threading.Event()
    monkeypatch.setattr(reader.Reader, "kill", lambda _self: killed.set())
    monkeypatch.setattr(reader.Reader, "read", lambda self, path: [killed.wait(20), *original(self, path)][1:])
    async with stage(runtime, size=(120, 40)) as s:
        s.app.chat._run_attaching(s.app.chat._attaching.attach(book))
        await s.shows("reading book.md · Esc stops")
        await s.pilot.press("escape")
        await s.hides("reading book.md")
        assert killed.is_set()
        await s.until(lambda: not s.app.session.documents.busy)
        assert sources(s) == []
        await attach(s, book)
        await s.shows("searches book.md")
