"""Export and import of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.conversation import Conversation, Message, Passage, Statistics
from app.errors import HistoryError
from app.history import exchange
from app.history.exchange import document, to_json, to_markdown
from app.history.store import Chat, History


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[History]:
    """No chat."""
    with closing(History(tmp_path / "empty.db")) as history:
        yield history


PASSAGE = Passage(file="book.md", unit="line", first=3, last=9, text="## You")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """One chat with two branches."""
    conversation = Conversation()
    first = conversation.add("user", "Show me a fence", parent=None)
    one = conversation.add("assistant", "```md\n## You\n```", parent=first.id, model="demo")
    conversation.revise(one.id, statistics=Statistics(tokens=5, k_chunk={"qkv": 2}), passages=(PASSAGE,))
    other = conversation.add("assistant", "no", parent=first.id, model="demo")
    conversation.revise(other.id, state="failed", error="it broke")
    conversation.head = one.id
    with closing(History(tmp_path / "history.db")) as history:
        history.record(conversation.id, one.id, [conversation[first.id], conversation[one.id], conversation[other.id]])
        yield history


def test_json_brings_back_every_branch(history: History, empty: History) -> None:
    (chat,) = history.chats()
    text = json.dumps(exchange.document([exchange.to_json(chat, history.messages(chat.id))]))
    (brought,) = exchange.read(text, "chats.json")
    assert exchange.import_chat(empty, brought) == chat.id
    assert empty.messages(chat.id) == history.messages(chat.id)
    assert empty.chats()[0].title == chat.title
    assert exchange.import_chat(empty, brought) is None


def test_a_chat_that_went_on_is_brought_beside_the_old_one(history: History) -> None:
    (chat,) = history.chats()
    content = exchange.to_json(chat, history.messages(chat.id))
    content["messages"][1]["text"] = "changed"
    (brought,) = exchange.read(json.dumps(exchange.document([content])), "chats.json")
    new = exchange.import_chat(history, brought)
    assert new not in (None, chat.id)
    assert [message.text for message in history.messages(chat.id)][1].startswith("```md")
    assert [message.text for message in history.messages(str(new))][1] == "changed"
    content["id"] = "another"
    (stolen,) = exchange.read(json.dumps(exchange.document([content])), "chats.json")
    assert exchange.import_chat(history, stolen) not in (None, "another")
    assert [message.text for message in history.messages(chat.id)][1].startswith("```md")


def test_markdown_shows_the_path_and_comes_back(history: History, empty: History) -> None:
    (chat,) = history.chats()
    text = exchange.to_markdown(chat, history.messages(chat.id))
    assert text.startswith("# Show me a fence\n")
    assert "\n## You\n\nShow me a fence" in text
    assert "\n## demo\n\n```md\n## You\n```" in text
    (brought,) = exchange.read(text, "chat.md")
    assert [(message.role, message.text, message.model) for message in brought.messages] == [
        ("user", "Show me a fence", None),
        ("assistant", "```md\n## You\n```", "demo"),
    ]
    assert exchange.import_chat(empty, brought)


def lines_of(*lines: str) -> st.SearchStrategy[str]:
    """Texts of these lines and of any others."""
    return st.lists(st.sampled_from(lines) | st.text(max_size=8), max_size=8).map("\n".join)


MARK = "<!-- lowbit-chat: user 2026-01-02T10:42:00+00:00 -->"
TEXTS = lines_of(
    "## You", "# demo", "   ## You", "\t## You", "- ## You", "> ## You", "###### You ##", "You", "---", "===", "", " ",
    "```", "~~~~", "````md", "    ```", "- ```", "  ```", "- a", "1. b", "> c", "> > - ```", "[You]: /x", "*stopped*",
    "<h2>You</h2>", "a <h2>You</h2>", "</blockquote>", "<pre>", "<!--", "-->", "<![CDATA[", "<script>", "a\r## You",
    "> " * 30 + "<h2>You</h2>", MARK, f"\r{MARK}", "`<h2>`", "text\n```\n", "\x0b## You", "\u2028## You", "\x00", "\\",
)  # fmt: skip
ZONES = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
NUMBERS = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)
COUNTS = st.none() | st.integers(0, 2**63 - 1)
STATISTICS = st.builds(
    Statistics, tokens=st.integers(0, 10**6), tokens_per_s=NUMBERS, first_after_s=NUMBERS, context_used=COUNTS,
    context=COUNTS, bits=NUMBERS, k_chunk=COUNTS | st.dictionaries(st.text(), st.integers(0, 1024)), gamma=COUNTS,
    slowdown_percent=st.none() | st.floats(-5, 5), memory_bytes=COUNTS, left_out=COUNTS, cut=st.booleans(),
)  # fmt: skip

PASSAGES = st.builds(
    Passage, file=TEXTS, unit=st.sampled_from(["line", "page", "paragraph"]), first=st.integers(1, 9),
    last=st.integers(10, 99), text=TEXTS,
)  # fmt: skip


@st.composite
def messages(draw: st.DrawFn, *, branches: bool) -> list[Message]:
    """Messages that follow each other, or any before them."""
    found: list[Message] = []
    for number in range(draw(st.integers(1, 5))):
        before = [message.id for message in found]
        answers = draw(st.booleans())
        state = draw(st.sampled_from(["done", "stopped", "failed"]))
        found.append(
            Message(
                id=f"m{number}",
                parent=draw(st.sampled_from([None, *before])) if branches else before[-1] if before else None,
                role="assistant" if answers else "user",
                text=draw(TEXTS),
                state=state,  # type: ignore[arg-type]
                error=draw(TEXTS) if state == "failed" else None,
                model=draw(st.none() | st.sampled_from(["you", "demo\n\n## You"]) | TEXTS.filter(bool)),
                statistics=draw(st.none() | STATISTICS),
                passages=draw(st.none() | st.lists(PASSAGES, max_size=2).map(tuple)) if answers else None,
                created=draw(st.datetimes(datetime(1971, 1, 1), datetime(8000, 1, 1), timezones=ZONES)),  # noqa: DTZ001
            )
        )
    return found


def chat_of(found: list[Message]) -> Chat:
    now = datetime.now(UTC)
    return Chat(id="c", title="A title", model=None, pinned=False, created=now, updated=now, head=found[-1].id)


@given(messages(branches=True))
def test_what_is_exported_comes_back_as_it_was(found: list[Message]) -> None:
    chat = chat_of(found)
    (brought,) = exchange.read(json.dumps(document([to_json(chat, found)]), ensure_ascii=False), "chats.json")
    assert (brought.id, brought.title, brought.head, brought.messages) == (chat.id, chat.title, chat.head, found)


@given(messages(branches=False))
def test_markdown_comes_back_as_it_was_and_holds_the_turns_that_were(found: list[Message]) -> None:
    """An answer that writes `## You`, or opens a code block, begins no turn and ends none."""
    text = to_markdown(chat_of(found), found)
    (brought,) = exchange.read(text, "chat.md")
    ids = [None, *(message.id for message in brought.messages)]
    assert [message.parent for message in brought.messages] == ids[:-1]
    came = [replace(one, id=was.id, parent=was.parent) for one, was in zip(brought.messages, found, strict=True)]
    assert came == [replace(message, statistics=None, passages=None) for message in found]

    tokens = MarkdownIt("commonmark").parse(text)
    tops = [at for at, token in enumerate(tokens) if token.type == "heading_open" and token.level == 0]
    turns = [tokens[at + 1].content for at in tops if tokens[at].tag in ("h1", "h2")]
    assert len(turns) == 1 + len(found)
    for said, message in zip(turns[1:], found, strict=True):
        assert (said == "You") == (message.role == "user")
    assert sum(token.type == "html_block" for token in tokens) == len(found)
    assert not any(child.type == "html_inline" for token in tokens for child in token.children or ())


def test_what_is_nested_deeper_than_is_looked_into_is_fenced() -> None:
    found = [Message(id="a", parent=None, role="user", text="> " * 30 + "<h2>You</h2>")]
    assert "```text\n> >" in to_markdown(chat_of(found), found)


def test_a_document_of_an_earlier_version_is_read() -> None:
    text = f"# Sky\n\n{MARK}\n## You\n\nWhy?\n\n{MARK.replace('user', 'assistant')}\n## demo\n\nRay\n\n> leigh\n"
    for ends in ("\n", "\r\n"):
        (brought,) = exchange.read(text.replace("\n", ends), "chat.md")
        assert [(message.text, message.model) for message in brought.messages] == [
            ("Why?", None),
            ("Ray\n\n> leigh", "demo"),
        ]


def test_a_document_with_the_line_ends_of_an_editor_is_read() -> None:
    found = [Message(id="a", parent=None, role="user", text="one\n## two")]
    (brought,) = exchange.read(to_markdown(chat_of(found), found).replace("\n", "\r\n"), "chat.md")
    assert brought.messages[0].text == "one\n## two"


def node(parent: str | None, role: str | None, *parts: object, **more: Any) -> dict[str, Any]:
    message = None if role is None else {"author": {"role": role}, "content": {"parts": list(parts)}, **more}
    return {"parent": parent, "message": message, "children": []}


def chatgpt() -> dict[str, Any]:
    return {
        "title": "Sky",
        "create_time": 1_700_000_000.5,
        "current_node": "e",
        "conversation_id": "c-1",
        "mapping": {
            "e": node("d", "assistant", "Rayleigh.", create_time=1_700_000_009, metadata={"model_slug": "gpt-4o"}),
            "root": node(None, None),
            "s": node("root", "system", ""),
            "u": node("s", "user", "Why blue?", {"asset_pointer": "image"}),
            "d": node("u", "tool", "searching"),
            "f": node("d", "assistant", "Scattering."),
        },
    }


def test_an_export_of_chatgpt_is_read(empty: History) -> None:
    (brought,) = exchange.read(json.dumps([chatgpt()]), "conversations.json")
    assert exchange.import_chat(empty, brought) == "c-1"
    assert exchange.import_chat(empty, brought) is None
    (chat,) = empty.chats()
    assert (chat.title, chat.head) == ("Sky", "e")
    found = {message.id: message for message in empty.messages("c-1")}
    assert (found["u"].text, found["u"].parent) == ("Why blue?", None)
    assert (found["e"].parent, found["f"].parent, found["e"].model) == ("u", "u", "gpt-4o")
    assert chat.updated.timestamp() == 1_700_000_009


def ours(**changes: Any) -> dict[str, Any]:
    """A file with one message."""
    message = {"id": "m", "parent": None, "role": "user", "text": "Hi", "state": "done", "created": NOW, **changes}
    return {
        "format": "lowbit-chat",
        "version": 1,
        "chats": [{"id": "c", "title": "t", "head": None, "messages": [message]}],
    }


NOW = "2026-01-02T10:42:00+00:00"
FIRST = "chats[0].messages[0]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ours(statistics={"tokens": 5, "tokens_per_s": "x"}), f"{FIRST}.statistics.tokens_per_s must be a number"),
        (ours(statistics={"tokens": -5}), f"{FIRST}.statistics.tokens must be a whole number of 0 or more, not -5"),
        (ours(statistics={"tokens": 10**30}), f"{FIRST}.statistics.tokens must be"),
        (ours(statistics=[]), f"{FIRST}.statistics must be an object or null"),
        (ours(text=3), f"{FIRST}.text must be a text"),
        (ours(text="x" * (2**24 + 1)), f"{FIRST}.text must be a text of 0 to 16777216 characters"),
        (ours(role="robot"), f"{FIRST}.role must be one of user, assistant"),
        (ours(id="x" * 301), f"{FIRST}.id must be a text of 1 to 300 characters"),
        (ours(error={}), f"{FIRST}.error must be"),
        (ours(created="2026-01-02T10:42:00"), f"{FIRST}.created: a moment with its zone was expected"),
        (ours(created="9999-12-31T23:59:59-12:00"), f"{FIRST}.created: a moment"),
        (ours(created="0001-01-01T00:00:00+14:00"), f"{FIRST}.created: a moment"),
        (ours(created=5), f"{FIRST}.created must be a text"),
        ({**ours(), "chats": [3]}, "chats[0] must be an object"),
        ({**ours(), "chats": {}}, "chats must be a list"),
        ({"mapping": {"a": {"message": {"create_time": 1e300}}}}, "[0].mapping.a.message.create_time must be a number"),
        ({"mapping": {"a" * 10**6: 3}}, f"conversations[0].mapping.{'a' * 59}… must be an object"),
        ({"mapping": {"a": {"message": {"author": 3}}}}, "conversations[0].mapping.a.message.author must be"),
        ({"mapping": {"a": {"message": {"content": {"parts": 3}}}}}, "mapping.a.message.content.parts must be a list"),
        ([{"mapping": {}}, {"mapping": []}], "conversations[1].mapping must be an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named_with_its_place(content: Any, said: str) -> None:
    with pytest.raises(HistoryError) as failure:
        exchange.read(json.dumps(content), "file.x")
    assert str(failure.value).startswith("file.x: ")
    assert said in str(failure.value)
    assert "nothing was imported" in str(failure.value)
    assert len(str(failure.value)) < 400


def test_all_of_a_file_is_brought_in_or_nothing(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    before = history.chats()
    chats = [exchange.read(json.dumps(ours(id=name)), "file.x")[0].renewed() for name in ("a", "b")]
    knows = History.knows

    def full(self: History, ids: list[str]) -> bool:
        if ids == [chats[1].messages[0].id]:
            raise HistoryError("the disk is full")
        return knows(self, ids)

    monkeypatch.setattr(History, "knows", full)
    with pytest.raises(HistoryError, match="full"):
        exchange.import_chats(history, chats)
    assert history.chats() == before
    monkeypatch.undo()
    assert exchange.import_chats(history, [*chats, chats[0]]) == [chat.id for chat in chats]
    assert len(history.chats()) == len(before) + 2


def test_half_a_character_in_a_file_is_replaced() -> None:
    (brought,) = exchange.read(json.dumps(ours(text="a \ud83d")), "file.x")
    assert brought.messages[0].text == "a \ufffd"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# A document\n\nof nobody's",
        "{",
        "[1, 2]",
        "[" * 100_000,
        '{"format": "lowbit-chat", "version": 9, "chats": []}',
        '{"format": "lowbit-chat", "version": 1, "chats": [{}]}',
        '{"format": "lowbit-chat", "version": 1, "chats": [{"id": "a", "title": "b", "head": "x", "messages": []}]}',
        '{"mapping": {"a": {"parent": "a", "message": {"author": {"role": 3}}}}, "title": 7}',
        "<!-- lowbit-chat: user yesterday -->\n## You\n\nHi",
        "<!-- lowbit-chat: user 2026-01-02T10:42:00 -->\n## You\n\nHi",
        "<!-- lowbit-chat: user 2026-01-02T10:42:00+00:00 {} -->\n## You\n\nHi\n\n<!-- lowbit-chat: user x {} -->",
        "<!-- lowbit-chat: user 2026-01-02T10:42:00+00:00 {1} -->\n## You\n\nHi",
        '<!-- lowbit-chat: user 2026-01-02T10:42:00+00:00 {"state": 3} -->\n## You\n\nHi',
        '<!-- lowbit-chat: user 2026-01-02T10:42:00+00:00 {"fence": "```"} -->\n## You\n\n```text\nHi',
        "9" * 10_000,
        "[" + "9" * 10_000 + "]",
    ],
)
def test_what_is_no_chat_is_refused_by_name(text: str) -> None:
    with pytest.raises(HistoryError, match=r"^file\.x"):
        exchange.read(text, "file.x")


def test_a_circle_of_parents_ends(empty: History) -> None:
    circle = {"mapping": {"a": node("b", "user", "x"), "b": node("a", "user", "y")}, "title": "t"}
    (brought,) = exchange.read(json.dumps(circle), "file.x")
    assert exchange.import_chat(empty, brought)
