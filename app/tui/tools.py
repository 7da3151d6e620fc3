"""Tools of the chats: which each may use, whether a call may run, and running it. Independent of widgets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event

from app.conversation import NOT_RUN, Call, CallState, Conversation, Message
from app.printable import printable
from app.tools.config import ServerConfig, ToolsError, load
from app.tools.contents import cut, room
from app.tools.permissions import Answer, Permissions
from app.tui.messages import CallAsked, ToolsChanged

if TYPE_CHECKING:
    from app.tools.server import ServerTool
    from app.tools.toolbox import NamedTool, Toolbox
    from app.tui.answers import Writing

MOST_ROUNDS = 8
"""Most rounds of calls for one prompt; then the model has to answer with what it has."""
WAIT_S = 60.0
"""Longest wait for servers that are starting, before an answer begins without their tools."""
REFUSED = "The user did not allow this call."
UNKNOWN = "There is no tool of this name."


@dataclass
class Ask:
    """A question whether a call may run."""

    call: Call
    tool: ServerTool
    answer: asyncio.Future[Answer]
    stopped: bool = False
    """Whether the user stops the answer instead."""


class ChatTools:
    """The servers, and what conversations may do with their tools."""

    def __init__(
        self,
        post: Callable[[Event], object],
        note: Callable[..., None],
        context: Callable[[], int | None],
        *,
        configs: Callable[[], Sequence[ServerConfig]] = load,
        permissions: Callable[[], Permissions] = Permissions.load,
    ) -> None:
        """Start without reading anything.

        Args:
            post: receives events; may be called from any thread.
            note: changes a conversation's `Extras` and saves them.
            context: size of the model's context in tokens, if known.
            configs: reads the servers.
            permissions: reads the permissions.
        """
        self._post, self._note, self._context = post, note, context
        self._configs, self._permissions_of = configs, permissions
        self.box: Toolbox | None = None
        """The servers; None if there are none, or before they are started."""
        self.permissions = Permissions()
        self.problem = ""
        """Why mcp.json can't be used."""
        self._asks: dict[str, Ask] = {}
        self._opened = False
        self.live: dict[str, str] = {}
        """What the call that runs in a conversation says, by the conversation's id."""

    # The servers

    async def open(self) -> None:
        """Read mcp.json, and start its servers in the background."""
        if self._opened:
            return
        self._opened = True
        self.permissions = await asyncio.to_thread(self._permissions_of)
        await self.reload()

    async def reload(self) -> None:
        """Read mcp.json again, and start the servers anew."""
        before, self.box, self.problem = self.box, None, ""
        if before is not None:
            await asyncio.to_thread(before.close)
        try:
            configs = await asyncio.to_thread(self._configs)
        except ToolsError as error:
            configs, self.problem = (), str(error)
        if configs:
            from app.tools.toolbox import Toolbox

            box = Toolbox(configs, lambda: self._post(ToolsChanged()))
            await asyncio.to_thread(box.open)
            self.box = box
        self._post(ToolsChanged())

    async def close(self) -> None:
        """End all servers. Safe to call twice."""
        self._opened = True
        box, self.box = self.box, None
        if box is not None:
            await asyncio.to_thread(box.close)

    # What a conversation may use

    def keys(self, conversation: Conversation) -> list[str]:
        """Keys of the tools that a conversation may use."""
        own = conversation.extras.tools
        return list(self.permissions.usual if own is None else own)

    def named(self, conversation: Conversation) -> list[NamedTool]:
        """The tools that a conversation may use now."""
        return self.box.named(self.keys(conversation)) if self.box is not None else []

    def size(self, conversation: Conversation) -> int:
        """Characters of their descriptions in a prompt."""
        return sum(len(json.dumps(one.record())) for one in self.named(conversation))

    def switch(self, conversation: Conversation, keys: Sequence[str], *, on: bool) -> None:
        """Let a conversation use tools, or no longer. New chats begin with the same ones.

        Raises:
            ToolsError: that can't be stored.
        """
        before = self.keys(conversation)
        now = [key for key in before if key not in keys] + ([*keys] if on else [])
        self._note(conversation, tools=now)
        self.permissions.begin_with(now)

    async def records(self, conversation: Conversation, path: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """The tools that an answer may call, in OpenAI's format; none after too many rounds of calls."""
        if not self.keys(conversation):
            return ()
        await self.open()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self.box is not None and not self.box.settled:  # noqa: ASYNC110  it settles in another thread
                    await asyncio.sleep(0.05)
        return [one.record() for one in self.named(conversation)] if rounds(path) < MOST_ROUNDS else ()

    # Calls

    def ask_of(self, conversation: str) -> Ask | None:
        """The question that waits for an answer in a conversation."""
        return self._asks.get(conversation)

    async def run(self, writing: Writing) -> bool:
        """Run the calls of an answer one by one, asking first where that is needed.

        Returns:
            Whether the model is to answer: always, so that a refused or failed call costs a sentence.
        """
        conversation, answer = writing.conversation, writing.answer
        known = {one.name: one.tool for one in self.named(conversation)}
        try:
            for call in conversation[answer].calls:
                await self._run_one(writing, call, known.get(call.name))
        except BaseException:
            self._asks.pop(conversation.id, None)
            for call in conversation[answer].calls:
                if not call.ended:
                    self._set(writing, call.id, "stopped", NOT_RUN)
            raise
        finally:
            self.live.pop(conversation.id, None)
        return True

    async def _run_one(self, writing: Writing, call: Call, tool: ServerTool | None) -> None:
        from runtime.text.arguments import problem_of

        conversation = writing.conversation
        if tool is None or self.box is None:
            self._set(writing, call.id, "failed", UNKNOWN)
            return
        self._set(writing, call.id, "asked", server=tool.server)
        if (problem := await asyncio.to_thread(problem_of, call.arguments, tool.schema)) is not None:
            self._set(writing, call.id, "failed", f"Not called, because of {problem}")
            return
        if not self.permissions.allows(tool.print, conversation.id) and not await self._may(conversation, call, tool):
            self._set(writing, call.id, "refused", REFUSED)
            return
        self._set(writing, call.id, "running")
        self.live[conversation.id] = ""

        def progress(words: str) -> None:
            self.live[conversation.id] = words

        try:
            found = await asyncio.wrap_future(self.box.call(tool, json.loads(call.arguments), progress))
            text, state = found.text, "failed" if found.failed else "done"
        except ToolsError as error:
            text, state = str(error), "failed"
        self._set(
            writing, call.id, "failed" if state == "failed" else "done", cut(printable(text), room(self._context()))
        )

    async def _may(self, conversation: Conversation, call: Call, tool: ServerTool) -> bool:
        """Ask whether a call may run, and wait for the answer."""
        ask = Ask(call, tool, asyncio.get_running_loop().create_future())
        self._asks[conversation.id] = ask
        self._post(CallAsked(conversation.id))
        try:
            answer = await ask.answer
        finally:
            self._asks.pop(conversation.id, None)
        with contextlib.suppress(ToolsError):  # it only means that the question comes again
            self.permissions.decide(tool.print, tool.key, conversation.id, answer)
        return answer != "no"

    @staticmethod
    def _set(writing: Writing, call: str, state: CallState, result: str = "", *, server: str | None = None) -> None:
        """Change a call of an answer, and show it."""
        conversation, answer = writing.conversation, writing.answer
        conversation.revise(
            answer,
            calls=tuple(
                replace(one, state=state, result=result, server=one.server if server is None else server)
                if one.id == call
                else one
                for one in conversation[answer].calls
            ),
        )
        if writing.on_calls is not None:
            writing.on_calls()


def rounds(path: Sequence[Message]) -> int:
    """How many answers in a row called tools, at the end of a path."""
    count = 0
    for message in reversed(path):
        if message.role == "user":
            break
        count += bool(message.calls)
    return count
