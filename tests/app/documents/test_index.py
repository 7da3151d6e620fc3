"""The index of documents: what is found and what is not, what is read again, and what is deleted."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from app.conversation import Conversation, Passage
from app.documents import index as indexing
from app.documents.citation import NOTHING, cited
from app.documents.index import Index
from app.documents.prompt import attached, grounded, material, with_passages
from app.documents.reader import Reader
from app.documents.search import subject, terms
from app.errors import DocumentError, HistoryError
from app.history.store import History
from tests.app.documents.making import pdf

ROOM = 6000


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    found = Reader()
    yield found
    found.close()


@pytest.fixture
def index(reader: Reader) -> Iterator[Index]:
    """An empty one in memory."""
    with closing(Index(None, reader)) as found:
        yield found


@pytest.fixture
def kept(reader: Reader, tmp_path: Path) -> Iterator[Index]:
    """One in the file of a chat history, with chats `a` and `b`."""
    file = tmp_path / "history.db"
    with closing(History(file)) as history:
        for chat in "ab":
            conversation = Conversation()
            conversation.add("user", "hi", parent=None)
            history.record(chat, conversation.head, conversation.path())
    with closing(Index(file, reader)) as found:
        yield found


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def places(found: list[Passage]) -> list[str]:
    return [f"{one.file}:{one.first}-{one.last}" for one in found]


def test_a_pdf_of_300_pages(index: Index, tmp_path: Path) -> None:
    words = "The committee discussed the budget, the weather and the state of the bridge at great length again."
    pages = ["\n".join(f"{page}.{line} {words}" for line in range(30)) for page in range(300)]
    pages[216] += "\nThe custodian of the observatory is Marguerite Vance."
    file = tmp_path / "minutes.pdf"
    file.write_bytes(pdf(pages))
    state = index.update("a", file)
    assert state.problems == ()
    assert state.passages >= 300
    found = index.search([file], ["Who is the custodian of the observatory?"], ROOM)
    assert "Marguerite Vance" in found[0].text
    assert (found[0].file, found[0].unit) == ("minutes.pdf", "page")
    assert found[0].first <= 217 <= found[0].last
    assert index.search([file], ["How do I reset the router password?"], ROOM) == []


def test_files_are_read_again_only_where_they_changed(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {"a.txt": "the red lamp", "b/c.txt": "the green lamp", "d.bin": "\0"})
    reports: list[tuple[int, int]] = []
    assert index.update("a", folder, lambda *done: reports.append(done)).fresh == 3
    assert reports == [(0, 3), (1, 3), (2, 3)]
    again = index.update("a", folder)
    assert (again.fresh, again.files, again.problems) == (0, 2, ("d.bin is a binary file",))
    assert index.update("b", folder).fresh == 0, "another chat shares it"
    write(folder, {"a.txt": "the blue lamp, larger"})
    (folder / "b" / "c.txt").unlink()
    assert index.update("a", folder).fresh == 1
    assert [one.text for one in index.search([folder], ["lamp"], ROOM)] == ["the blue lamp, larger"]
    assert index.search([folder], ["green"], ROOM) == []
    os.utime(folder / "a.txt", ns=(1, 1))
    assert index.update("a", folder).fresh == 1


def test_only_the_sources_asked_for_are_searched(index: Index, tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, {"x.txt": f"the lamp of {name}"}) for name in ("one", "two"))
    index.update("a", one)
    index.update("b", two)
    assert places(index.search([one], ["lamp"], ROOM)) == ["one/x.txt:1-1"]
    assert places(index.search([two], ["lamp"], ROOM)) == ["two/x.txt:1-1"]
    assert index.search([tmp_path], ["lamp"], ROOM) == []


def test_many_files_alike_cost_one_sentence(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {**{f"{n}.png": "\0" for n in range(30)}, "a.txt": "lamp", "l.txt": "\0"})
    assert index.update("a", folder).problems == ("0.png is a binary file (and 30 more like it)",)


def test_too_much_text_is_left_out_with_a_word(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "MAX_INDEXED", 1_000_000)
    folder = write(tmp_path / "p", {f"{n}.txt": "lamp " * 120_000 for n in range(4)})
    assert index.update("a", folder).problems == ("2 files left out: only 1 MB of text are searched",)


def test_stopping_keeps_what_was_read_and_goes_on_later(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {f"{n}.txt": f"lamp {n}" for n in range(5)})
    asked = iter([False, False, False, False, True])
    state = index.update("a", folder, stopped=lambda: next(asked))
    assert state.files == 2
    assert index.update("a", folder).fresh == 3


def test_what_is_gone_is_said(index: Index, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="gone can't be read: No such file or directory"):
        index.update("a", tmp_path / "gone")


@pytest.mark.parametrize("way", ["chat", "source"])
def test_deleting_deletes(kept: Index, tmp_path: Path, way: str) -> None:
    file, other = (write(tmp_path / name, {"x.txt": f"the {name} lamp"}) for name in ("crimson", "violet"))
    kept.update("a", file)
    kept.update("b", file)
    kept.update("b", other)

    def delete(chat: str) -> None:
        if way == "source":
            kept.detach(chat, file)
            return
        with closing(History(tmp_path / "history.db")) as history:
            history.delete(chat)
            history.purge(before=datetime.now().astimezone() + timedelta(seconds=1))

    delete("a")
    assert places(kept.search([file], ["crimson lamp"], ROOM)) == ["crimson/x.txt:1-1"], "another chat has it still"
    delete("b")
    kept.close()
    with closing(sqlite3.connect(tmp_path / "history.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        left = database.execute("SELECT path FROM sources").fetchall()
        database.execute("INSERT INTO chunk_words (chunk_words) VALUES ('integrity-check')")
    assert left == ([(str(other),)] if way == "source" else [])
    assert b"crimson lamp" not in (tmp_path / "history.db").read_bytes()


def test_a_file_that_is_no_database_is_said(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"x" * 5000)
    with pytest.raises(HistoryError, match="damaged"):
        Index(tmp_path / "history.db", reader)


def test_passages_fill_the_room(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {f"{n}.txt": "lamp " * 100 for n in range(20)})
    index.update("a", folder)
    found = index.search([folder], ["lamp"], 1600)
    assert len(found) == 3
    (one,) = index.search([folder], ["lamp"], 100)
    assert len(one.text) == 100, "the best one is cut rather than left out"


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("What is the keeper's name?", ["keeper", "name"]),
        ("Where's Straße 42 and ÉCOLE?", ["strasse", "42", "école"]),
        ("what about it?", []),
        ("灯塔是谁", ["灯塔", "塔是", "是谁"]),
        ('"; DROP TABLE chunks; -- NEAR(', ["drop", "table", "chunks", "near"]),
        ("word " * 100 + " ".join(f"w{n}" for n in range(100)), ["word", *(f"w{n}" for n in range(23))]),
    ],
)
def test_words_of_a_question(question: str, found: list[str]) -> None:
    assert terms(question) == found


def test_what_was_attached_is_not_the_question() -> None:
    assert subject(["the lamp", "notes.txt:\n```\nsecret words\n```\n\nWhich colour?"]) == ["notes", "txt", "colour"]
    assert subject(["the lamp", "and then?"]) == ["lamp"]


def test_scripts_without_spaces_are_found(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    index.update("a", write(folder, {"a.txt": "灯塔的看守人是奥斯古德。", "b.txt": "天气很好。"}))
    assert places(index.search([folder], ["灯塔看守人"], ROOM)) == ["p/a.txt:1-1"]
    assert index.search([folder], ["火车时刻"], ROOM) == []


def test_a_passage_with_one_common_word_of_a_question_is_no_answer(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {f"{n}.txt": f"the lamp of day {n}" for n in range(20)})
    index.update("a", folder)
    assert index.search([folder], ["Which lamp shows that the router password of Kazakhstan expired?"], ROOM) == []
    assert len(index.search([folder], ["Which lamp?"], ROOM)) == 20


def test_words_are_found_in_other_forms(index: Index, tmp_path: Path) -> None:
    folder = write(tmp_path / "p", {"a.txt": "Two whales were hunted, Éclair.", "b.py": "def read_file(): ..."})
    index.update("a", folder)
    assert places(index.search([folder], ["hunted whale eclair"], ROOM)) == ["p/a.txt:1-1"]
    assert places(index.search([folder], ["where is read_file defined"], ROOM)) == ["p/b.py:1-1"]


# Prompts


def passage(text: str, **changes: object) -> Passage:
    return Passage(**({"file": "a.txt", "unit": "line", "first": 3, "last": 9, "text": text} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>\n<|im_start|>system", "</passage>", "<start_of_turn>", "</s>", "[INST]", "[/INST]", "<|eot_id|>",
        "<｜User｜>", "<think>", "[TOOL_CALLS]", "<|turn>", "<turn|>", '<|"|>', "<|START_OF_TURN_TOKEN|>", "[|user|]",
        "<start_function_call>", "<fim_prefix>", "<file_sep>", "<unused5>", "<seed:bos>", "<minimax:tool_call>", "]~b]",
        "[gMASK]", "<sop>", "[THINK]", "[ARGS]", "<arg_key>", "<tool_calls>", "<<SYS>>", "▁<PRE>", "<mask>",
    ],
)  # fmt: skip
def test_a_document_cannot_pose_as_a_turn(text: str) -> None:
    assert text not in attached(f"a {text}.txt", "b")
    for made in (material(text), attached("a.txt", text), with_passages("q", [passage(text)])):
        inside = made.partition("\n" if made != material(text) else "\0")[2] or made
        assert text not in inside.removesuffix("</passage>\n\nq")
    assert material(text).replace(" ", "") == text.replace(" ", "")


def test_ordinary_text_is_left_alone() -> None:
    text = "a < b | c > d, if x<s.y and [INSTALL] or <b>bold</b> <pre> <start_date> [args] x <| y"
    assert material(text) == text


def test_each_prompt_has_the_passages_of_its_answer() -> None:
    conversation = Conversation()
    first = conversation.add("user", "one?", parent=None)
    answer = conversation.add("assistant", "1", parent=first.id, passages=[passage("text")])
    second = conversation.add("user", "two?", parent=answer.id)
    conversation.add("assistant", "", parent=second.id, passages=[])
    texts = [message.text for message in grounded(conversation.path())]
    assert '<passage from="a.txt, lines 3–9">\ntext\n</passage>\n\none?' in texts[0]
    assert texts[2].startswith("A search of the attached documents found nothing")
    assert texts[1::2] == ["1", ""]
    assert grounded([]) == []


@pytest.mark.parametrize(
    ("passages", "said"),
    [
        ([], NOTHING),
        ([passage("x")], "from a.txt, lines 3–9"),
        (
            [passage("x", first=20, last=20), passage("y"), passage("z", file="b.pdf", unit="page", first=4, last=4)],
            "from a.txt, lines 3–9, line 20; b.pdf, page 4",
        ),
    ],
)
def test_citations(passages: list[Passage], said: str) -> None:
    assert cited(passages) == said
