"""A conversation of `run`: its model, documents and tools, and its answers as they are printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.chat.answers import Answer, Continued, Event, Written
from app.chat.documents import Documents
from app.chat.prompts import LeftOut, Model, NotSearched, Prompts
from app.chat.tools import CallAsked, CallChanged, ChatTools
from app.cli.output import CliError, Interrupt, Output, at_a_terminal, in_one_line
from app.conversation import Conversation, Extras, Message
from app.documents.citation import cited
from app.documents.prompt import estimated_tokens
from app.language import _, number
from app.printable import printable, printable_name
from app.tools.config import load
from app.tools.permissions import Answer as Permission

if TYPE_CHECKING:
    from app.client import RuntimeClient
    from app.local import LocalRuntime
    from app.protocol import ChatDelta, ChatOptions
    from app.settings import Settings
    from runtime.wire.answers import Status, Timings

_POLL_S = 0.05


class _Continuing:
    """A model that continues a text as it is instead of answering it."""

    def __init__(self, runtime: RuntimeClient | LocalRuntime) -> None:
        self._runtime = runtime

    def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        return self._runtime.complete(messages[-1]["content"], options)


class Talk:
    """A conversation with one model. Nothing of it is stored.

    Args:
        runtime: The model.
        status: How it runs.
        settings: The general settings.
        chosen: System prompt and sampling of this conversation; see `Prompts.sampling`.
        output: Gets the answers and notes.
        raw: Whether texts are continued as they are, without a chat template.
        count: Tokens of a text; None if they are certainly more than the context holds.
        read: Shows a question and returns the user's line.
    """

    def __init__(
        self,
        runtime: RuntimeClient | LocalRuntime,
        status: Status,
        settings: Settings,
        chosen: Mapping[str, Any],
        output: Output,
        *,
        raw: bool = False,
        count: Callable[[str], int | None] = estimated_tokens,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self.runtime, self.status, self.settings = runtime, status, settings
        self.raw = raw
        self.conversation = Conversation()
        self.conversation.id = ""
        self.conversation.extras = replace(self.conversation.extras, settings=dict(chosen))
        self.timings: Timings | None = None
        """Statistics of the last answer."""
        self.finish_reason: str | None = None
        self.left: Callable[[Conversation], object] = lambda _conversation: None
        """Called with a conversation that another one follows."""
        self._output, self._count, self._read = output, count, read or _typed_answer
        self._documents = Documents(None, lambda: False)
        self._attached: list[str] = []
        self._unasked: frozenset[str] = frozenset()
        self._questioned = ""  # the call that was asked about last
        self._tools = ChatTools(self.note, configs=list)
        self._prompts = Prompts(self, self._documents, self._tools)

    async def close(self) -> None:
        """End the servers, the documents' reader and the model. Safe to call twice."""
        await self._tools.close()
        await self._documents.close()
        await self.runtime.aclose()

    # What `Prompts` and `Answer` need of their host

    async def model_for(self, _conversation: Conversation) -> Model:
        return _Continuing(self.runtime) if self.raw else self.runtime

    async def why(self, failure: Exception) -> str:
        return in_one_line(failure)

    def note(self, conversation: Conversation, **changes: Any) -> None:
        conversation.extras = replace(conversation.extras, **changes)

    def use(self, runtime: LocalRuntime, status: Status) -> None:
        """Have another model answer from now on."""
        self.runtime, self.status, self._count = runtime, status, runtime.tokens

    def begin(self) -> None:
        """Begin a new conversation with the same system prompt and sampling."""
        self._attached = []
        self.go_on(Conversation())

    def go_on(self, conversation: Conversation) -> None:
        """Go on with a conversation, by its system prompt and sampling where none were chosen."""
        self.left(self.conversation)
        own = {**conversation.extras.settings, **self.conversation.extras.settings}
        conversation.extras = Extras(settings=own, since=conversation.extras.since, summary=conversation.extras.summary)
        self.conversation = conversation

    # Documents and tools

    async def attach(self, path: Path) -> None:
        """Attach a file or folder: a short one goes into the next prompt, others are searched for each question.

        Args:
            path: Its absolute path.

        Raises:
            DocumentError: it can't be read.
        """
        whole = await self._documents.whole(path, self.status.context or 0, self._count)
        if whole is not None:
            self._attached.append(whole.content)
            self._output.note(f"{printable_name(path.name)}: {_size(whole.files, number(whole.tokens, ','))}")
            problems = whole.problems
        else:
            state = await self._documents.search(self.conversation, path, self.note)
            size = _size(state.files, _("about {count:,}", count=state.tokens))
            self._output.note(
                _(
                    "{name} ({size}) is too long to be sent: it is searched for each question",
                    name=state.name,
                    size=size,
                )
            )
            problems = state.problems
        for problem in problems:
            self._output.note(problem)

    async def open_tools(self, file: Path, yes: Sequence[str]) -> None:
        """Start the servers of tools.

        Args:
            file: The file of servers.
            yes: Names of the tools that run without asking.

        Raises:
            CliError: the file can't be used, or `yes` names a tool that no server has.
        """
        tools = self._tools = ChatTools(self.note, configs=lambda: load(file))
        self._prompts = Prompts(self, self._documents, tools)
        await tools.open()
        if tools.problem and tools.box is None:
            raise CliError(tools.problem)
        if tools.problem:
            self._output.note(_("tools: {problem}", problem=tools.problem))
        await tools.settle()
        for server in tools.box.servers if tools.box is not None else ():
            for note in filter(None, (server.problem, *server.notes)):
                self._output.note(_("tools: {problem}", problem=note))
        self._use_all_tools()
        named = {one.name: one.tool for one in tools.named(self.conversation)}
        if unknown := set(yes) - {*named, *(tool.key for tool in named.values())}:
            await tools.close()
            known = ", ".join(named) or _("none")
            raise CliError(
                _(
                    "--yes-tools names {unknown}, which no server has; the tools are: {known}",
                    unknown=", ".join(sorted(unknown)),
                    known=known,
                )
            )
        # A yes is to a tool as it is now; when it changes, it is asked about.
        self._unasked = frozenset(tool.fingerprint for name, tool in named.items() if {name, tool.key} & set(yes))

    def _use_all_tools(self) -> None:
        if self._tools.box is not None:
            self.note(self.conversation, tools=[tool.key for tool in self._tools.box.tools])

    @property
    def tools(self) -> list[str]:
        """The tools, by the names that the model is told."""
        return [one.name for one in self._tools.named(self.conversation)]

    # Answers

    @property
    def cut(self) -> bool:
        """Whether the last answer ended because the context is full."""
        return self.finish_reason == "length" and self.sampling()["max_tokens"] is None

    @property
    def ending(self) -> str:
        """What is to be said of how the last answer ended; empty if nothing."""
        if self.finish_reason == "loop":
            return _("the answer was stopped: it only repeated itself")
        if not self.cut:
            return ""
        return _("the answer was cut: the context of {count} tokens is full", count=self.status.context)

    def sampling(self) -> dict[str, Any]:
        """How answers are sampled."""
        return self._prompts.sampling(self.conversation)

    @property
    def own(self) -> Mapping[str, Any]:
        """The conversation's own system prompt and sampling."""
        return self.conversation.extras.settings

    def choose(self, own: Mapping[str, Any]) -> None:
        """Replace the conversation's own system prompt and sampling."""
        self.note(self.conversation, settings=own)

    @property
    def system_prompt(self) -> str:
        """The system prompt; empty for none."""
        return str(self._prompts.setting_of(self.conversation, "system_prompt"))

    async def ask(self, text: str) -> list[Message]:
        """Print the answer to a text. Ctrl-C stops it.

        Returns:
            Its messages; what called tools is followed by what answered their results.

        Raises:
            CliError: there is none. The conversation is as before.
        """
        self.timings = self.finish_reason = None
        with Interrupt() as interrupt:
            return await self._asked(text, interrupt.cancelled)

    async def _asked(self, text: str, cancelled: Callable[[], bool]) -> list[Message]:
        conversation = self.conversation
        self._use_all_tools()
        before, attached, self._attached = conversation.head, self._attached, []
        prompt = conversation.add("user", "\n\n".join([*attached, text]), parent=None if self.raw else before)
        message = conversation.add("assistant", "", parent=prompt.id, state="streaming").id
        printing = asyncio.create_task(self._print(message))
        while not printing.done():
            await asyncio.wait([printing], timeout=_POLL_S)
            if cancelled():
                printing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await printing
        if not printing.cancelled():
            printing.result()
        messages = [one for one in conversation.path()[1:] if one.role == "assistant"]
        messages = messages[[one.id for one in messages].index(message) :]
        if messages[-1].state == "failed":
            conversation.head, self._attached = before, attached
            raise CliError(messages[-1].error or _("the answer failed"))
        if not self._output.as_json and not messages[-1].text.endswith("\n"):
            self._output.stream("\n")
        if not self._output.as_json and messages[0].passages is not None:
            self._output.note(cited(messages[0].passages))
        return messages

    async def _print(self, message: str) -> None:
        """Print the events of an answer."""
        answer = Answer(self, self._prompts, self._tools, self.conversation, message)
        async with contextlib.aclosing(answer.events()) as events:
            async for event in events:
                self._draw(answer, event)

    def _draw(self, answer: Answer, event: Event) -> None:
        match event:
            case Written(delta):
                self._show(delta)
            case CallAsked():
                event.answer.set_result(self._permission(event))
            case CallChanged(call) if call.state == "running" and call.id != self._questioned:
                self._output.note(f"{printable_name(call.server)} · {call.name} {printable(call.arguments)}")
            case CallChanged(call) if call.state == "failed":
                self._output.note(f"{call.name}: {printable(call.result.partition(chr(10))[0])}")
            case Continued() if not self._output.as_json and self._said_before(answer):
                self._output.stream("\n")
            case LeftOut():
                self._output.note(_("the conversation no longer fits in the context: its beginning is left out"))
            case NotSearched(reason):
                self._output.note(_("the documents were not searched: {reason}", reason=reason))
            case _:
                pass

    def _said_before(self, answer: Answer) -> bool:
        parent = self.conversation[answer.message].parent
        return parent is not None and bool(self.conversation[parent].text.strip())

    def _show(self, delta: ChatDelta) -> None:
        self.timings = delta.timings or self.timings
        self.finish_reason = delta.finish_reason or self.finish_reason
        if not self._output.as_json:
            self._output.stream(delta.text)
        elif self._output.lines and delta.text:
            self._output.result({"text": delta.text})

    def _permission(self, asked: CallAsked) -> Permission:
        """Whether a call may run; asks on a terminal."""
        tool, call = asked.tool, asked.call
        if tool.fingerprint in self._unasked:
            return "once"
        line = f"{printable_name(tool.server)} · {call.name} {printable(call.arguments)}"
        if self._output.as_json or not at_a_terminal():
            self._output.note(_("{call}: not allowed; --yes-tools {name} allows it", call=line, name=call.name))
            return "no"
        self._questioned = call.id
        self._output.note(f"{line} ({_('it says that it only reads') if tool.reads else _('it may change something')})")
        answer = self._read(_("call it? [y]es once, [c] in this conversation, [n]o: ")).strip().lower()
        return "chat" if answer in ("c", "conversation") else "once" if answer in ("y", "yes") else "no"


def _size(files: int, tokens: str) -> str:
    """The size of what is attached: `4 files, 1,024 tokens`."""
    size = _("{count} tokens", count=tokens)
    return size if files == 1 else _("{count:,} files, {tokens}", count=files, tokens=size)


def called(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Name, arguments and result of every call of an answer."""
    return [
        {"name": call.name, "arguments": json.loads(call.arguments), "result": call.result}
        for message in messages
        for call in message.calls
    ]


def _typed_answer(question: str) -> str:
    """Ask on the terminal. What was typed before the question is no answer to it."""
    if sys.platform != "win32":
        import termios

        with contextlib.suppress(termios.error):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
    return input(question)
