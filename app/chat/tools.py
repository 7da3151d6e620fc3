"""Tools of the chats: which each may use, whether a call may run, and running it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.conversation import NOT_RUN, Call, CallState, Conversation, Message
from app.printable import printable
from app.threads import run_to_end
from app.tools.config import ServerConfig, ToolsError, load
from app.tools.contents import cut, room
from app.tools.permissions import Answer, Permissions
from runtime.system.foreign import read_json

if TYPE_CHECKING:
    from app.tools.server import ServerTool
    from app.tools.toolbox import NamedTool, Toolbox

MOST_ROUNDS = 8
"""Most rounds of calls for one prompt; then the model has to answer with what it has."""
WAIT_S = 60.0
"""Longest wait for servers that are starting, before an answer begins without their tools."""
REFUSED = "The user did not allow this call."
UNKNOWN = "There is no tool of this name."


@dataclass(frozen=True, slots=True)
class CallChanged:
    """A call of an answer got another state or its result."""

    call: Call


@dataclass(slots=True)
class CallAsked:
    """A call waits for permission, which is the result of `answer`."""

    call: Call
    tool: ServerTool
    answer: asyncio.Future[Answer]
    stopped: bool = False
    """Whether the user stops the answer instead."""


class ChatTools:
    """The servers, and what conversations may do with their tools."""

    def __init__(
        self,
        note: Callable[..., None],
        *,
        changed: Callable[[], object] = lambda: None,
        configs: Callable[[], Sequence[ServerConfig]] = load,
        permissions: Callable[[], Permissions] = Permissions.load,
    ) -> None:
        """Start without reading anything.

        Args:
            note: changes a conversation's `Extras` and saves them.
            changed: called when servers or their lists have changed; from any thread.
            configs: reads the servers.
            permissions: reads the permissions.
        """
        self._note, self._changed = note, changed
        self._configs, self._permissions_of = configs, permissions
        self.box: Toolbox | None = None
        """The servers; None if there are none, or before they are started."""
        self.permissions = Permissions()
        self.problem = ""
        """Why mcp.json or tools.json can't be used."""
        self._asked: dict[str, CallAsked] = {}
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
        before, self.box, self.problem = self.box, None, self.permissions.problem
        if before is not None:
            await run_to_end(before.close)
        try:
            configs = await asyncio.to_thread(self._configs)
        except ToolsError as error:
            configs, self.problem = (), str(error)
        if configs:
            from app.tools.toolbox import Toolbox

            box = Toolbox(configs, self._changed)
            try:
                await run_to_end(box.open)
            except asyncio.CancelledError:
                await run_to_end(box.close)
                raise
            self.box = box
        self._changed()

    async def settle(self) -> None:
        """Wait for servers that are starting, but not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self.box is not None and not self.box.settled:  # noqa: ASYNC110  it settles in another thread
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all servers. Safe to call twice."""
        self._opened = True
        box, self.box = self.box, None
        if box is not None:
            await run_to_end(box.close)

    # What a conversation may use

    def keys(self, conversation: Conversation) -> list[str]:
        """Keys of the tools that a conversation may use."""
        chosen = conversation.extras.tools
        return list(self.permissions.usual if chosen is None else chosen)

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
        now = [key for key in self.keys(conversation) if key not in keys] + ([*keys] if on else [])
        self._note(conversation, tools=now)
        self.permissions.begin_with(now)

    async def records(self, conversation: Conversation, path: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """The tools that an answer may call, in OpenAI's format; none after too many rounds of calls."""
        if not self.keys(conversation):
            return ()
        await self.open()
        await self.settle()
        return [one.record() for one in self.named(conversation)] if rounds(path) < MOST_ROUNDS else ()

    # Calls

    def waiting(self, conversation: str) -> CallAsked | None:
        """The call that waits for permission in a conversation."""
        return self._asked.get(conversation)

    async def run(
        self, conversation: Conversation, answer: str, context: int | None
    ) -> AsyncGenerator[CallChanged | CallAsked, None]:
        """Run the calls of an answer one by one, asking first where that is needed.

        Every call gets a result for the model, also one that was refused or failed.

        Args:
            conversation: the conversation.
            answer: id of the answer.
            context: size of the model's context in tokens, if known.
        """
        tools = {one.name: one.tool for one in self.named(conversation)}

        def change(call: str, state: CallState, result: str = "", *, server: str | None = None) -> CallChanged:
            calls = {one.id: one for one in conversation[answer].calls}
            server = calls[call].server if server is None else server
            calls[call] = replace(calls[call], state=state, result=result, server=server)
            conversation.revise(answer, calls=tuple(calls.values()))
            return CallChanged(calls[call])

        try:
            for call in conversation[answer].calls:
                tool = tools.get(call.name)
                if tool is None or self.box is None:
                    yield change(call.id, "failed", UNKNOWN)
                    continue
                yield change(call.id, "asked", server=tool.server)
                if (problem := await _problem(call, tool)) is not None:
                    yield change(call.id, "failed", f"Not called, because of {problem}")
                    continue
                if not self.permissions.allows(tool.fingerprint, conversation.id):
                    asked = CallAsked(call, tool, asyncio.get_running_loop().create_future())
                    self._asked[conversation.id] = asked
                    yield asked
                    answered = await asked.answer
                    with contextlib.suppress(ToolsError):  # it only means that the question comes again
                        self.permissions.decide(tool.fingerprint, tool.key, conversation.id, answered)
                    if answered == "no":
                        yield change(call.id, "refused", REFUSED)
                        continue
                yield change(call.id, "running")
                state, text = await self._call(conversation, call, tool)
                yield change(call.id, state, cut(printable(text), room(context)))
        except BaseException:
            for call in conversation[answer].calls:
                if not call.ended:
                    change(call.id, "stopped", NOT_RUN)
            raise
        finally:
            self._asked.pop(conversation.id, None)
            self.live.pop(conversation.id, None)

    async def _call(self, conversation: Conversation, call: Call, tool: ServerTool) -> tuple[CallState, str]:
        self.live[conversation.id] = ""

        def progress(words: str) -> None:
            self.live[conversation.id] = words

        try:
            if self.box is None:
                return "failed", UNKNOWN
            result = await asyncio.wrap_future(self.box.call(tool, read_json(call.arguments), progress))
        except ToolsError as error:
            return "failed", str(error)
        return "failed" if result.failed else "done", result.text


async def _problem(call: Call, tool: ServerTool) -> str | None:
    """What is wrong with the arguments of a call."""
    from runtime.text.schema_process import problem_of

    return await asyncio.to_thread(problem_of, call.arguments, tool.schema)


def rounds(path: Sequence[Message]) -> int:
    """How many answers in a row called tools, at the end of a path."""
    count = 0
    for message in reversed(path):
        if message.role == "user":
            break
        count += bool(message.calls)
    return count
