"""The chat store: saved, searched, deleted, and intact after crashes."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from app.conversation import Conversation, Extras, Message, Statistics, prompt_of
from app.errors import HistoryError
from app.history import schema
from app.history.exchange import document, read, to_json, to_markdown
from app.history.recorder import Recorder
from app.history.schema import open_database, version_of
from app.history.store import History, title_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """An empty one."""
    with closing(History(tmp_path / "home" / "history.db")) as history:
        yield history


def texts_in(path: Path, chat: str) -> list[str]:
    """What was said in a chat that a file keeps."""
    with closing(History(path)) as history:
        return [message.text for message in history.messages(chat)]


def said(history: History, *texts: str, model: str | None = None) -> Conversation:
    """A chat of turns, kept."""
    conversation = Conversation()
    for turn, text in enumerate(texts):
        role, by = ("assistant", model) if turn % 2 else ("user", None)
        conversation.add(role, text, parent=conversation.head, model=by)  # type: ignore[arg-type]
    history.record(conversation.id, conversation.head, conversation.path())
    return conversation


def test_a_chat_comes_back_as_it_was(history: History) -> None:
    conversation = said(history, "Why is the sky blue?\nIn one line.", "Rayleigh.")
    last = conversation.path()[-1]
    numbers = Statistics(tokens=7, tokens_per_s=12.5, k_chunk={"qkv": 3}, estimated=True)
    answered = conversation.revise(last.id, text="Rayleigh scattering. 🌈", model="demo", statistics=numbers)
    history.record(conversation.id, conversation.head, [answered])
    (chat,) = history.chats()
    assert (chat.id, chat.title, chat.model, chat.head) == (conversation.id, "Why is the sky blue?", "demo", last.id)
    assert history.messages(chat.id) == conversation.path()


def test_every_branch_is_kept(history: History) -> None:
    conversation = said(history, "Hi", "Hello")
    first = conversation.path()[0]
    other = conversation.add("assistant", "Good day", parent=first.id)
    history.record(conversation.id, other.id, [other])
    assert [message.text for message in history.messages(conversation.id)] == ["Hi", "Hello", "Good day"]
    assert history.chats()[0].head == other.id


def test_an_answer_that_was_being_written_counts_as_stopped(history: History) -> None:
    conversation = said(history, "Hi")
    answer = conversation.add("assistant", "Hel", parent=conversation.head, state="streaming")
    history.record(conversation.id, answer.id, [answer])
    assert history.messages(conversation.id)[-1].state == "stopped"


def test_only_the_owner_can_read_it(history: History) -> None:
    if sys.platform != "win32":
        assert stat.S_IMODE(history.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(history.path.parent.stat().st_mode) == 0o700


def test_chats_are_listed_newest_first_and_pinned_ones_above(history: History) -> None:
    ids = [said(history, text).id for text in ("one", "two", "three")]
    assert [chat.title for chat in history.chats()] == ["three", "two", "one"]
    history.pin(ids[0], pinned=True)
    history.rename(ids[1], "  The  second\none ")
    assert [chat.title for chat in history.chats()] == ["one", "three", "The second"]
    assert [chat.title for chat in history.chats(limit=1)] == ["one"]
    history.pin(ids[0], pinned=False)
    assert history.chats()[-1].title == "one"
    with pytest.raises(HistoryError, match="needs a word"):
        history.rename(ids[0], " \n ")


def test_a_title_given_by_a_person_stays(history: History) -> None:
    conversation = said(history, "Hi")
    history.rename(conversation.id, "Greetings")
    more = conversation.add("user", "Something else", parent=conversation.head)
    history.record(conversation.id, more.id, [more])
    assert history.chats()[0].title == "Greetings"


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ("outlier", 2),
        ("OUTLIERS matter", 1),
        ("matter outl", 1),
        ("creme", 1),
        ("量子", 1),
        ("nothing like it", 0),
        ('" OR text:*', 0),
        ("NEAR(", 0),
        ("   ", 0),
    ],
)
def test_search_finds_words_as_they_are_typed(history: History, asked: str, count: int) -> None:
    said(history, "Why do activation outliers matter?", "An outlier multiplies the error.")
    said(history, "A recipe for crème brûlée", "这是关于量子化的回答")
    assert len(history.search(asked)) == count


@pytest.mark.parametrize(("needle", "asked"), [("needle", "Needl"), ("量子化", "量子")], ids=["words", "ideographs"])
def test_search_says_where(history: History, needle: str, asked: str) -> None:
    said(history, "first " * 50 + f"{needle}\n" + "last " * 50)
    (found,) = history.search(asked)
    assert found.pieces[1] in (needle, asked)
    assert needle in found.snippet
    assert "\n" not in found.snippet
    assert len(found.snippet) < 200


def test_a_changed_answer_is_found_by_its_new_words_alone(history: History) -> None:
    conversation = said(history, "Hi", "alpha")
    changed = conversation.revise(conversation.path()[-1].id, text="beta")
    history.record(conversation.id, conversation.head, [changed])
    assert (len(history.search("alpha")), len(history.search("beta"))) == (0, 1)


def test_a_deleted_chat_comes_back_or_is_overwritten(history: History) -> None:
    conversation = said(history, "my secret word: xyzzy")
    history.delete(conversation.id)
    assert (history.chats(), history.search("xyzzy"), history.purge()) == ([], [], [])
    history.restore(conversation.id)
    assert len(history.search("xyzzy")) == 1
    history.delete(conversation.id)
    later = datetime.now().astimezone() + timedelta(seconds=1)
    assert history.purge(before=later) == [conversation.id]
    with pytest.raises(HistoryError, match="no chat"):
        history.restore(conversation.id)
    history.close()
    with closing(sqlite3.connect(history.path)) as database:  # checkpoints the log
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"xyzzy" not in history.path.read_bytes()


def test_a_chat_is_found_by_the_beginning_of_its_id(history: History) -> None:
    one, two = said(history, "one"), said(history, "two")
    assert history.find(one.id[:12]).id == one.id
    assert history.find(two.id).id == two.id
    for wrong in ("", "%", "nothing", "_"):
        with pytest.raises(HistoryError, match="no chat"):
            history.find(wrong)
    for chat in ("alike-1", "alike-2"):
        history.note(chat, None, Extras(draft="a draft"))
    with pytest.raises(HistoryError, match="several chats begin with alike; write more of it"):
        history.find("alike")
    assert history.find("ALIKE-2").id == "alike-2"


def test_what_fails_half_way_leaves_nothing(history: History) -> None:
    whole = Message(id="a", parent=None, role="user", text="Hi")
    broken = Message(id="b", parent="a", role=None, text="Hello")  # type: ignore[arg-type]
    with pytest.raises(HistoryError, match="NOT NULL"):
        history.record("c", "b", [whole, broken])
    assert history.chats() == history.messages("c") == []
    history.record("c", "a", [whole])
    assert [chat.id for chat in history.chats()] == ["c"]


def test_two_programs_write_at_once(history: History) -> None:
    with closing(History(history.path)) as other:
        for turn in range(20):
            said(history if turn % 2 else other, f"turn {turn}")
        assert len(history.chats()) == len(other.chats()) == 20


def test_a_damaged_file_is_told_and_left(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(HistoryError, match="damaged"):
        History(path)
    assert path.read_bytes().startswith(b"this is no database")


def test_a_newer_file_is_left_alone(history: History) -> None:
    said(history, "Hi")
    history.close()
    with closing(sqlite3.connect(history.path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryError, match="newer version"):
        History(history.path)


def test_a_migration_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = tmp_path / "history.db", len(schema.MIGRATIONS)
    History(path).close()
    monkeypatch.setattr(
        schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE more (a TEXT); CREATE TABLE chats (b);")
    )
    with pytest.raises(HistoryError, match="already exists"):
        open_database(path)
    with closing(sqlite3.connect(path)) as database:
        assert version_of(database) == before
        assert not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'more'").fetchall()
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:before], "CREATE TABLE more (a TEXT);"))
    with closing(open_database(path)) as database:
        assert version_of(database) == before + 1


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    ready = threading.Barrier(4)

    def opened(path: Path) -> None:
        ready.wait()
        open_database(path).close()

    with ThreadPoolExecutor(4) as pool:
        for number in range(60):
            list(pool.map(opened, [tmp_path / f"{number}.db"] * 4))


def test_an_unwritable_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be kept"):
        History(tmp_path / "file" / "history.db")


def test_a_recorder_writes_what_it_was_told_last(tmp_path: Path) -> None:
    errors: list[str] = []
    recorder = Recorder(tmp_path / "history.db", errors.append)
    conversation = Conversation()
    first = conversation.add("user", "Hi", parent=None)
    recorder.record(conversation.id, first.id, first)
    answer = conversation.add("assistant", "", parent=first.id, state="streaming")
    for count in range(100):
        answer = conversation.revise(answer.id, text="x" * count)
        recorder.record(conversation.id, answer.id, answer)
    recorder.close()
    recorder.close()
    assert errors == []
    assert texts_in(tmp_path / "history.db", conversation.id) == ["Hi", "x" * 99]


def test_a_recorder_tells_once_why_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors: list[str] = []
    recorder = Recorder(tmp_path / "file" / "history.db", errors.append)
    message = Message(id="a", parent=None, role="user", text="Hi")
    for _ in range(3):
        recorder.record("chat", "a", message)
        time.sleep(0.01)
    recorder.close()
    assert len(errors) == 1


def flushed(recorder: Recorder) -> None:
    """Flush, which must not hang."""
    thread = threading.Thread(target=recorder.flush, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "flush hangs"


def test_half_a_character_stops_nothing(tmp_path: Path) -> None:
    errors: list[str] = []
    recorder = Recorder(tmp_path / "history.db", errors.append)
    for number, text in enumerate(("a \ud83d b", "after")):
        recorder.record("chat", None, Message(id=str(number), parent=None, role="user", text=text, error="\udcff"))
        flushed(recorder)
    recorder.note("chat", "1", Extras(draft="\ud83d"))
    recorder.close()
    assert errors == []
    with closing(History(tmp_path / "history.db")) as history:
        assert [message.text for message in history.messages("chat")] == ["a \ufffd b", "after"]
        assert history.search("\udcff") == history.search("\ufffd")


def test_a_message_that_cannot_be_written_is_told_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    recorder, record = Recorder(tmp_path / "history.db", errors.append), History.record

    def failing(self: History, chat: str, head: str | None, messages: list[Message]) -> None:
        if any(message.text == "poison" for message in messages):
            raise TypeError("no such thing")
        record(self, chat, head, messages)

    monkeypatch.setattr(History, "record", failing)
    for text in ("one", "poison", "two", "poison"):
        recorder.record("chat", None, Message(id=text, parent=None, role="user", text=text))
    flushed(recorder)
    recorder.record("chat", None, Message(id="three", parent=None, role="user", text="three"))
    flushed(recorder)
    recorder.close()
    assert errors == ["it cannot be written (TypeError: no such thing)"]
    assert texts_in(tmp_path / "history.db", "chat") == ["one", "two", "three"]


def test_what_could_not_be_written_is_written_when_it_can_be(tmp_path: Path) -> None:
    place, errors = tmp_path / "place", list[str]()
    place.write_text("")
    recorder = Recorder(place / "history.db", errors.append)
    recorder.record("chat", "a", Message(id="a", parent=None, role="user", text="one"))
    flushed(recorder)
    assert len(errors) == 1
    place.unlink()
    recorder.record("chat", "b", Message(id="b", parent="a", role="assistant", text="two"))
    flushed(recorder)
    assert texts_in(place / "history.db", "chat") == ["one", "two"]
    recorder.close()
    assert len(errors) == 1


def test_somebody_who_fails_to_be_told_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def gone(_reason: str) -> None:
        raise RuntimeError("the screen is gone")

    recorder = Recorder(tmp_path / "file" / "history.db", gone)
    for text in ("one", "two"):
        recorder.record("chat", None, Message(id=text, parent=None, role="user", text=text))
        flushed(recorder)
    recorder.close()


WRITER = """
import sys
from pathlib import Path
from app.conversation import Conversation
from app.history.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), print)
conversation = Conversation()
print("ready", flush=True)
turn = 0
while True:
    user = conversation.add("user", f"question {turn}", parent=conversation.head)
    recorder.record(conversation.id, user.id, user)
    answer = conversation.add("assistant", "", parent=user.id, state="streaming")
    for part in range(50):
        answer = conversation.revise(answer.id, text=answer.text + f"word{part} ")
        recorder.record(conversation.id, answer.id, answer)
    turn += 1
"""


LOOK = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(*(text for (text,) in database.execute("SELECT text FROM messages ORDER BY number")))
database.close()
"""


def test_another_program_that_looks_loses_nothing(tmp_path: Path) -> None:
    """The UI has two connections; whoever closes his must not take himself for the last."""
    path = tmp_path / "history.db"

    def look() -> str:
        done = subprocess.run([sys.executable, "-c", LOOK, str(path)], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    writing = History(path)
    writing.record("c", "a", [Message(id="a", parent=None, role="user", text="one")])
    reading = History(path)
    assert look() == "one"
    writing.record("c", "b", [Message(id="b", parent="a", role="assistant", text="two")])
    assert look() == "one two"
    assert [message.text for message in reading.messages("c")] == ["one", "two"]
    writing.close()
    reading.close()
    assert look() == "one two"


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path, rng = tmp_path / "history.db", random.Random(0)
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.8))
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
        with closing(History(path)) as history, closing(sqlite3.connect(path)) as database:
            for chat in history.chats():
                seen: set[str | None] = {None}
                for message in history.messages(chat.id):
                    assert message.parent in seen
                    seen.add(message.id)
                assert chat.head in seen
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            database.execute("INSERT INTO words (words) VALUES ('integrity-check')")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", "New chat"),
        ("\n  \n What   is\tthis? \nMore", "What is this?"),
        ("word " * 30, "word " * 11 + "word…"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_titles(text: str, title: str) -> None:
    assert title_of(text) == title


NOW = "2026-01-02T10:42:00+00:00"


def test_a_history_of_the_first_version_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.db"
    with monkeypatch.context() as old:
        old.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        database = open_database(path)
        database.execute("INSERT INTO chats (id, title, created, updated) VALUES ('a', 'Old', ?, ?)", (NOW, NOW))
        database.execute(
            "INSERT INTO messages (id, chat, role, text, state, created) VALUES ('m', 'a', 'user', 'Hi', 'done', ?)",
            (NOW,),
        )
        database.close()
    history = History(path)
    (chat,) = history.chats()
    assert (chat.title, chat.extras) == ("Old", Extras())
    assert [message.text for message in history.messages("a")] == ["Hi"]
    history.note("a", "m", Extras(model="small", settings={"temperature": 0.5}, draft="and"))
    assert history.find("a").extras == Extras(model="small", settings={"temperature": 0.5}, draft="and")
    assert history.find("a").head == "m"
    assert history.prompts() == ["Hi"]
    history.close()


def test_a_draft_alone_is_a_chat_until_it_is_sent_or_deleted(history: History) -> None:
    history.note("d", None, Extras(draft="why is the\nsky blue"))
    history.note("nothing", None, Extras())
    (chat,) = history.chats()
    assert (chat.id, chat.title) == ("d", "why is the")
    history.drop_empty()
    assert len(history.chats()) == 1
    history.note("d", None, Extras())
    history.drop_empty()
    assert history.chats() == []


def test_prompts_are_the_newest_ones_each_once(history: History) -> None:
    for text in ("a", "b", "a", "c"):
        said(history, text)
    assert history.prompts() == ["b", "a", "c"]
    assert history.prompts(1) == ["c"]


KEPT = {
    "chats": ("title", "head", "model", "pinned", "created", "updated", "extras"),
    "messages": ("parent", "role", "state", "error", "model", "statistics", "passages", "calls", "created"),
}


@pytest.mark.parametrize(
    "garbage",
    ["garbage", "", "[" * 100_000, "[1]", '{"a": 1}', "9999-12-31T23:59-23:59", "\0\x1b[2J"],
    ids=lambda garbage: garbage[:22],
)
@pytest.mark.parametrize(("table", "column"), [(table, column) for table in KEPT for column in KEPT[table]])
def test_garbage_in_a_column_loses_no_message(history: History, table: str, column: str, garbage: str) -> None:
    conversation = said(history, "Why is the sky blue?", "Rayleigh scattering.")
    value = garbage if column != "pinned" else -(2**63)
    history._database.execute(f"UPDATE {table} SET {column} = ?", (value,))
    history.drop_empty()
    history.purge()
    (chat,) = history.chats()
    messages = history.messages(chat.id)
    assert [message.text for message in messages] == ["Why is the sky blue?", "Rayleigh scattering."]
    assert history.search("scattering")[0].chat == history.find(conversation.id) == chat
    assert "Rayleigh scattering." in to_markdown(chat, messages)
    told = json.dumps(document([to_json(chat, messages)]))
    (again,) = read(told, "chat.json")
    assert [message.text for message in again.messages] == [message.text for message in messages]
    assert prompt_of(messages)


def test_text_that_is_not_utf8_is_shown_as_far_as_it_is(history: History) -> None:
    conversation = said(history, "Why is the sky blue?")
    history._database.execute("UPDATE messages SET text = CAST(x'536B79FF' AS TEXT)")
    assert [message.text for message in history.messages(conversation.id)] == ["Sky\N{REPLACEMENT CHARACTER}"]


def test_a_malformed_part_leaves_the_others(history: History) -> None:
    conversation = said(history, "Hi", "Hello")
    history.note(conversation.id, conversation.head, Extras(draft="not sent yet"))
    history._database.execute("UPDATE chats SET extras = json_set(extras, '$.sources', 3, '$.settings', json('[[1]]'))")
    assert history.find(conversation.id).extras == Extras(draft="not sent yet")
    good = {"id": "1", "name": "read", "arguments": "{}", "state": "done", "result": "text"}
    history._database.execute("UPDATE messages SET calls = ?", (json.dumps([3, good, {"id": 1}]),))
    assert [call.result for call in history.messages(conversation.id)[1].calls] == ["text"]


@pytest.mark.parametrize(
    "statistics",
    ['{"tokens": "x"}', '{"tokens": 5, "tokens_per_s": "x"}', '{"tokens": -1}', '{"tokens": 5, "k_chunk": ["x"]}', "3"],
)
def test_what_an_earlier_version_took_from_a_file_does_no_harm(history: History, statistics: str) -> None:
    """It checked neither statistics nor whether a moment has a zone: the screen that showed them ended the program."""
    chat = said(history, "Hi", "Hello").id
    history._database.execute("UPDATE messages SET statistics = ?, created = '2026-01-02T10:42:00'", (statistics,))
    history._database.execute("UPDATE chats SET created = '2026-01-02T10:42:00', extras = '[3]'")
    assert [message.statistics for message in history.messages(chat)] == [None, None]
    moments = [history.find(chat).created, *(message.created for message in history.messages(chat))]
    assert all(moment < datetime.now().astimezone() for moment in moments)
    assert history.find(chat).extras == Extras()
