"""An answer as events, with a scripted host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from app.chat.answers import Answer, Continued
from app.conversation import Conversation
from app.protocol import CallDelta, ChatDelta


async def test_messages_are_summarized_once_where_that_was_asked_for_this_time() -> None:
    """The answer to what tools returned leaves out more without another summary."""
    conversation, asked = Conversation(), list[bool]()
    deltas = [ChatDelta(text="", calls=[CallDelta(index=0, name="look", arguments="{}")]), ChatDelta(text="Seen.")]

    class Host:
        status = None

        async def model_for(self, _conversation: Any) -> Any:
            return self

        async def chat(self, _messages: Any, _options: Any) -> AsyncIterator[ChatDelta]:
            yield deltas.pop(0)

    async def make(*_: Any, summarize: bool, **_how: Any) -> Any:
        asked.append(summarize)
        return SimpleNamespace(messages=[], options=None, events=())

    async def run(*_: Any) -> AsyncIterator[Any]:
        for event in ():
            yield event

    prompt = conversation.add("user", "Look.", parent=None)
    message = conversation.add("assistant", "", parent=prompt.id, state="streaming").id
    parts: Any = (Host(), SimpleNamespace(make=make), SimpleNamespace(run=run))
    answer = Answer(*parts, conversation, message, summarize=True)
    events = [event async for event in answer.events()]
    assert sum(isinstance(event, Continued) for event in events) == 1
    assert asked == [True, False]
    assert [(one.text, one.state) for one in conversation.path()[1:]] == [("", "done"), ("Seen.", "done")]
