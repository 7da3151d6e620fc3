"""`run --mcp`: what is called, asked, refused, and left running."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cli.output import CliError, Output
from app.cli.serve import result_of
from app.cli.talk import Talk, _typed_answer, called
from app.conversation import Message
from app.protocol import CallDelta, ChatDelta, ChatOptions
from app.settings import load
from runtime.wire.answers import Status

HOSTILE = Path(__file__).parents[1] / "tools" / "hostile.py"
STATUS = Status(state="ready", model="scripted", backend="cpu", context=4096)
Call = tuple[str, str]


class Scripted:
    """A model that says and calls what it is told: for each prompt a text and calls, each of a name and a text."""

    def __init__(self, *answers: tuple[str, Sequence[Call]]) -> None:
        self._answers = list(answers)
        self.prompts: list[tuple[list[Mapping[str, Any]], list[str]]] = []

    async def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> AsyncIterator[ChatDelta]:
        self.prompts.append((list(messages), [tool["function"]["name"] for tool in options.tools or ()]))
        text, calls = self._answers.pop(0)
        for at in range(0, len(text), 5):
            yield ChatDelta(text=text[at : at + 5])
        for at, (name, given) in enumerate(calls):
            yield ChatDelta(text="", calls=[CallDelta(index=at, name=name, arguments=json.dumps({"text": given}))])
        yield ChatDelta(text="", finish_reason="tool_calls" if calls else "stop")

    async def aclose(self) -> None:
        pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one server that behaves."""
    made = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": [str(HOSTILE), "good"]}
    made.write_text(json.dumps({"mcpServers": {"good": server}}))
    return made


def talk(
    model: Scripted, file: Path | None = None, yes: Sequence[str] = (), *questions: str, read: Any = None
) -> list[Message]:
    """The messages of the last answer."""

    async def talked() -> list[Message]:
        talking = Talk(model, STATUS, load(), {}, Output(), read=read)  # type: ignore[arg-type]
        try:
            if file is not None:
                await talking.open_tools(file, yes)
            for question in questions or ("Go.",):
                messages = await talking.ask(question)
            return messages
        finally:
            await talking.close()

    return result_of(talked())


def results(messages: Sequence[Message]) -> list[str]:
    return [one["result"] for one in called(messages)]


def test_a_tool_that_may_runs_unasked_and_others_do_not(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Scripted(("So.", [("echo", "hello"), ("write", "x"), ("gone", "x")]), ("Done.", ()))
    answer = talk(model, file, ["echo"])
    assert results(answer) == ["hello", "The user did not allow this call.", "There is no tool of this name."]
    assert model.prompts[0][1] == ["echo", "write"]
    assert [message["role"] for message in model.prompts[1][0]] == ["user", "assistant", "tool", "tool", "tool"]
    said = capsys.readouterr()
    assert said.out == "So.\nDone.\n"
    assert 'good · echo {"text": "hello"}\n' in said.err
    assert "not allowed; --yes-tools write allows it" in said.err


def test_a_yes_is_to_a_tool_as_it_was(file: Path) -> None:
    file.write_text(file.read_text().replace('"good"]', '"rug"]'))
    model = Scripted(("", [("echo", "half \ud83d")]), ("Yes.", ()), ("", [("echo", "again")]), ("No.", ()))

    async def talked() -> list[str]:
        talking = Talk(model, STATUS, load(), {}, Output())  # type: ignore[arg-type]
        try:
            await talking.open_tools(file, ["echo"])
            before = results(await talking.ask("Go."))
            async with asyncio.timeout(20):  # the server changes the tool after its first call
                while "1" in talking._tools.named(talking.conversation)[0].tool.description:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return before + results(await talking.ask("Go."))
        finally:
            await talking.close()

    assert result_of(talked()) == ["half \ufffd", "The user did not allow this call."]


def test_with_several_servers_a_bare_name_is_nobody_s(file: Path) -> None:
    entry = json.loads(file.read_text())["mcpServers"]["good"]
    file.write_text(json.dumps({"mcpServers": {"good": {"command": "/no/such"}, "other": entry}}))
    for name in ("echo", "good_echo", "good/echo"):
        with pytest.raises(CliError, match="the tools are: other_echo, other_write"):
            talk(Scripted(), file, [name])


@pytest.mark.parametrize(("answers", "ran"), [("yy", 2), ("c", 2), ("nn", 0)])
def test_the_terminal_is_asked(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: str, ran: int
) -> None:
    monkeypatch.setattr("app.cli.talk.at_a_terminal", lambda: True)
    typed = iter(answers)
    model = Scripted(("", [("echo", "hello")]), ("", [("echo", "hello")]), ("Done.", ()))
    assert results(talk(model, file, read=lambda _: next(typed))).count("hello") == ran
    assert next(typed, None) is None
    assert capsys.readouterr().err.count('good · echo {"text": "hello"}') == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_what_was_typed_before_a_question_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    leader, follower = pty.openpty()
    with os.fdopen(leader, "wb", buffering=0) as keys, os.fdopen(follower) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", lambda _: "" if select.select([terminal], [], [], 0)[0] else "asked")
        keys.write(b"yes\n")
        select.select([terminal], [], [], 10)
        assert _typed_answer("call it? ") == "asked"


def test_a_loop_of_calls_has_a_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.chat.tools.MOST_ROUNDS", 2)
    model = Scripted(*[("", [("echo", "x")])] * 2, ("Enough.", ()))
    answer = talk(model, file, ["good/echo"])
    assert (len(called(answer)), answer[-1].text) == (2, "Enough.")
    assert model.prompts[2][1] == []


def test_an_unknown_tool_and_a_broken_file_are_clear_errors(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--yes-tools names erase, which no server has; the tools are: echo, write"):
        talk(Scripted(), file, ["erase"])
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(CliError, match="lists no servers"):
        talk(Scripted(), broken)
