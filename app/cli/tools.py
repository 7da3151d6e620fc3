"""Tools given to `run`: the servers of a file, what may run unasked, and a conversation that calls them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.errors import CliError
from app.cli.output import Output, at_a_terminal
from app.printable import printable, printable_name
from app.tools.config import ToolsError, load
from app.tools.contents import cut, room
from app.tools.permissions import Permissions

if TYPE_CHECKING:
    from app.tools.toolbox import NamedTool, Toolbox
    from runtime.engine.engine import Engine
    from runtime.engine.generation import Piece
    from runtime.text.sampling import SamplingOptions
    from runtime.text.tool_calls import Tool, ToolCall

MOST_ROUNDS = 8
"""Most rounds of calls for one prompt, as in the terminal UI."""
START_S = 60.0
"""Longest wait for the servers."""
_POLL_S = 0.1
_CHAT = "run"


class RunTools:
    """The tools of one run.

    Args:
        file: The file of servers; None: none.
        yes: Names of the tools that run without asking.
        output: Says what is called, and asks.
        read: Shows a question and returns the user's line.
    """

    def __init__(
        self, file: Path | None, yes: Sequence[str], output: Output, read: Callable[[str], str] = input
    ) -> None:
        self._output, self._read = output, read
        self._box: Toolbox | None = None
        self._yes = frozenset(yes)
        self._permissions = Permissions()
        self.named: Mapping[str, NamedTool] = {}
        """The tools, by the names that the model is told."""
        if file is not None:
            self._open(file)

    def _open(self, file: Path) -> None:
        from app.tools.toolbox import Toolbox

        try:
            configs = load(file)
        except ToolsError as error:
            raise CliError(str(error)) from error
        self._permissions = Permissions.load()
        self._box = box = Toolbox(configs)
        box.open()
        deadline = time.monotonic() + START_S
        while not box.settled and time.monotonic() < deadline:
            time.sleep(0.02)
        for server in box.servers:
            for note in filter(None, (server.problem, *server.notes)):
                self._output.note(f"tools: {note}")
        self.named = {one.name: one for one in box.named([tool.key for tool in box.tools])}
        unknown = self._yes - {*self.named, *(one.tool.key for one in self.named.values())}
        if unknown:
            self.close()
            known = ", ".join(self.named) or "none"
            raise CliError(
                f"--yes-tools names {', '.join(sorted(unknown))}, which no server has; the tools are: {known}"
            )

    def close(self) -> None:
        """End the servers. Safe to call twice."""
        if self._box is not None:
            self._box.close()

    @property
    def tools(self) -> list[Tool]:
        """The tools, as the engine takes them."""
        from runtime.text.tool_calls import Tool

        return [
            Tool(name=name, description=one.tool.description, parameters=one.tool.schema)
            for name, one in self.named.items()
        ]

    def run(self, call: ToolCall, context: int, cancelled: Callable[[], bool]) -> str:
        """What the model gets for a call: its result, or why there is none."""
        from runtime.text.arguments import problem_of

        one = self.named[call.name]
        tool, line = one.tool, f"{printable_name(one.tool.server)} · {call.name} {printable(call.arguments)}"
        if (problem := problem_of(call.arguments, tool.schema)) is not None:
            self._output.note(f"{line}: not called, because of {printable(problem)}")
            return f"Not called, because of {problem}"
        if not self._may(one, line):
            return "The user did not allow this call."
        assert self._box is not None, "it has the tool"
        try:
            work = self._box.call(tool, json.loads(call.arguments))
            found = _result(work, cancelled)
            text = found.text if found is not None else "The call was stopped before it had a result."
        except ToolsError as error:
            text = str(error)
            self._output.note(text)
        return cut(printable(text), room(context))

    def _may(self, one: NamedTool, line: str) -> bool:
        """Whether a call may run; asks on a terminal."""
        tool = one.tool
        if {one.name, tool.key} & self._yes or self._permissions.allows(tool.print, _CHAT):
            self._output.note(line)
            return True
        if self._output.as_json or not at_a_terminal():
            self._output.note(f"{line}: not allowed; --yes-tools {one.name} allows it")
            return False
        kind = "it says that it only reads" if tool.reads else "it may change something"
        self._output.note(f"{line} ({kind})")
        answer = self._read("call it? [y]es once, [c] in this conversation, [n]o: ").strip().lower()
        if answer in ("c", "conversation"):
            self._permissions.decide(tool.print, tool.key, _CHAT, "chat")
        return answer in ("y", "yes", "c", "conversation")


def _result(work: Future[Any], cancelled: Callable[[], bool]) -> Any:
    """Wait for a call; None if it was cancelled."""
    while True:
        try:
            return work.result(_POLL_S)
        except FutureTimeoutError:
            if work.done():
                raise
            if cancelled():
                work.cancel()
                return None


@dataclass(frozen=True, slots=True)
class Conversed:
    """An answer, after all calls."""

    text: str
    last: Piece
    messages: Sequence[Mapping[str, Any]]
    """The conversation with the answer, its calls and their results."""
    calls: Sequence[Mapping[str, Any]]
    """Name, arguments and result of every call."""


def converse(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingOptions,
    cancelled: Callable[[], bool],
    show: Callable[[str], object],
    tools: RunTools,
    variables: Mapping[str, Any] | None = None,
) -> Conversed:
    """Answer a conversation; what the model calls is run, and its results are answered.

    Args:
        engine: The loaded model.
        messages: The conversation, with the prompt at its end.
        sampling: How answers are sampled.
        cancelled: Polled between steps.
        show: Gets the text as it is generated.
        tools: The tools that may be called.
        variables: Further variables of the chat template.
    """
    from runtime.text.call_grammar import CallRules
    from runtime.text.call_reader import CallReader
    from runtime.text.tool_calls import ToolCall

    told, called, text = list(messages), list[Mapping[str, Any]](), ""
    sampling = replace(sampling, stop=(*sampling.stop, *engine.chat_stops))
    for number in range(MOST_ROUNDS + 1):
        offered = tools.tools if number < MOST_ROUNDS else []
        rules = CallRules.of(offered, required=False) if offered else None
        reader = CallReader(offered) if offered else None
        calls = list[ToolCall]()
        prompt = engine.chat_prompt(told, tools=offered, variables=variables)
        said = engine.reasoning_opened(prompt)
        show(said)
        for piece in engine.generate(prompt, replace(sampling, calls=rules), cancelled):
            fed = [(piece.text, list[Any]())] if reader is None else [reader.feed(piece.text)]
            if reader is not None and piece.finish_reason is not None:
                fed.append(reader.finish())
            for more, found in fed:
                said += more
                calls += [one for one in found if isinstance(one, ToolCall)]
                show(more)
        text += said
        if piece.finish_reason == "cancelled":
            calls.clear()
        records = [
            {
                "id": f"call{number}-{at}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for at, call in enumerate(calls)
        ]
        told.append({"role": "assistant", "content": said, **({"tool_calls": records} if records else {})})
        if not calls:
            break
        if said.strip():
            show("\n")
        for call, record in zip(calls, records, strict=True):
            result = tools.run(call, engine.context, cancelled)
            told.append({"role": "tool", "tool_call_id": record["id"], "content": result})
            called.append({"name": call.name, "arguments": json.loads(call.arguments), "result": result})
    return Conversed(text, piece, told, called)


def continued(
    engine: Engine,
    text: str,
    sampling: SamplingOptions,
    cancelled: Callable[[], bool],
    show: Callable[[str], object],
) -> Conversed:
    """Continue a text as it is, without a chat template; arguments as of `converse`."""
    said = ""
    for piece in engine.generate(engine.text_prompt(text), sampling, cancelled):
        said += piece.text
        show(piece.text)
    return Conversed(said, piece, (), ())
