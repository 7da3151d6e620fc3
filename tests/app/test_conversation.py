"""The conversation: paths, siblings, and messages that never change."""

from __future__ import annotations

import dataclasses

import pytest

from app.conversation import Conversation, prompt_of


def test_path_follows_the_parents_from_the_head() -> None:
    conversation = Conversation()
    first = conversation.add("user", "a", parent=None)
    answer = conversation.add("assistant", "b", parent=first.id)
    assert [message.text for message in conversation.path()] == ["a", "b"]
    other = conversation.add("assistant", "c", parent=first.id)
    assert [message.text for message in conversation.path()] == ["a", "c"]
    assert [message.text for message in conversation.path(answer.id)] == ["a", "b"]
    assert conversation.siblings(other.id) == [conversation[answer.id], other]
    assert len(conversation) == 3


def test_a_message_is_replaced_never_changed() -> None:
    conversation = Conversation()
    before = conversation.add("assistant", "", parent=None, state="streaming")
    after = conversation.revise(before.id, text="x", state="stopped")
    assert before.text == ""
    assert conversation[before.id] is after
    assert after.resumable
    assert (after.id, after.created) == (before.id, before.created)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.text = "y"  # type: ignore[misc]


def test_unknown_parents_and_ids_are_refused() -> None:
    conversation = Conversation()
    with pytest.raises(KeyError):
        conversation.add("user", "a", parent="nobody")
    with pytest.raises(KeyError):
        conversation.revise("nobody", text="")
    assert len(conversation) == 0
    assert conversation.path() == []


def test_another_one_is_empty_and_leaves_the_first_as_it_is() -> None:
    conversation = Conversation()
    conversation.add("user", "a", parent=None)
    another = conversation.another()
    assert another.id != conversation.id
    assert another.head is None
    assert len(another) == 0
    assert len(conversation) == 1


def test_branches_are_walked_to_their_newest_ends() -> None:
    conversation = Conversation()
    first = conversation.add("user", "a", parent=None)
    one = conversation.add("assistant", "b", parent=first.id)
    conversation.add("user", "older", parent=one.id)
    newer = conversation.add("user", "newer", parent=one.id)
    other = conversation.add("assistant", "c", parent=first.id)
    assert conversation.walk(other.id, -1)
    assert conversation.head == newer.id
    assert not conversation.walk(one.id, -1)
    assert conversation.head == newer.id
    assert conversation.walk(one.id, 1)
    assert conversation.head == other.id
    assert conversation.branches()[first.id] == [one.id, other.id]


def test_the_prompt_has_turns() -> None:
    conversation = Conversation()
    for role, text in (("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c"), ("user", "d")):
        conversation.add(role, text, parent=conversation.head)
    path = conversation.path()
    turns = [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]
    assert [(item["role"], item["content"]) for item in prompt_of(path)] == turns
    assert prompt_of(path, " be kind ")[0] == {"role": "system", "content": " be kind "}
    assert prompt_of([], "  ") == []


@pytest.mark.parametrize(
    "parents",
    [[None, "a", "b"], ["a", "a", "b"], ["c", "a", "b"], ["b", "c", "c"], ["b", "c", None], ["x", "b", "a"]],
    ids=str,
)
def test_every_restored_path_ends(parents: list[str | None]) -> None:
    """Also where a file has messages that follow each other in a circle; and parents come first."""
    conversation = Conversation()
    messages = [
        dataclasses.replace(conversation.add("user", one, parent=None), id=one, parent=parent)
        for one, parent in zip("abc", parents, strict=True)
    ]
    conversation.restore("chat", messages, "c")
    assert {message.id for message in conversation} == {"a", "b", "c"}
    seen: list[str | None] = [None]
    for message in conversation:
        assert message.parent in seen
        assert conversation.path(message.id)[-1] == message
        assert conversation.leaf(message.id)
        seen.append(message.id)
