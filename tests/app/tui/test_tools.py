"""Tools in the chat: asking, refusing, stopping; what the model is told; the screen of tools."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app import paths
from app.chat import tools as chat_tools
from app.history import exchange
from app.history.store import History
from app.tui.screens.chat_dialogs import AskDialog
from app.tui.screens.tools import ToolsScreen
from app.tui.widgets.call_view import CallView

HOSTILE = Path(__file__).parents[1] / "tools" / "hostile.py"
Stage = Callable[..., Any]
ECHO = 'Let me see.\nCALL echo {"text": "hello"}'


def calls(s: Any) -> list[Any]:
    """All calls of the chat."""
    return [call for message in s.app.session.conversation.path() for call in message.calls]


async def asked(s: Any) -> None:
    await s.until(lambda: isinstance(s.app.screen, AskDialog), "the question")
    await s.settled()


async def test_a_call_runs_when_it_is_allowed(stage: Stage, runtime: Any, served: Any) -> None:
    served("good")
    runtime.answers = [ECHO, "It said hello."]
    async with stage(runtime, size=(100, 40)) as s:
        await s.ask("What does it say?")
        await asked(s)
        await s.shows(
            "Allow the model to run echo (server good)?", "The server says that it only reads.", '"text": "hello"'
        )
        assert calls(s)[0].state == "asked"
        await s.pilot.press("y")
        await s.answered()
        (call,) = calls(s)
        assert (call.state, call.result, call.server) == ("done", "hello", "good")
        assert s.last.text == "It said hello."
        await s.shows('▸ good · echo · done · {"text": "hello"}')
        first, second = runtime.named("chat")
        assert [tool["function"]["name"] for tool in first[1].tools] == ["echo", "write"]
        said, result = second[0][-2:]
        assert said["tool_calls"][0]["function"] == {"name": "echo", "arguments": '{"text": "hello"}'}
        assert result == {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "hello"}
        view = s.app.chat.query_one(CallView)
        view.unfold(True)
        await s.shows('  "text": "hello"')
        runtime.answers = [*runtime.answers, ECHO, "Again."]
        await s.ask("And now?")
        await asked(s)  # once is once
        await s.pilot.press("c")
        await s.answered()
        await s.say("And again?")  # in this chat
        assert [call.state for call in calls(s)] == ["done"] * 2


@pytest.mark.parametrize(
    ("calm_s", "alone_s"),
    [
        pytest.param(3600, 0.001, id="at once", marks=pytest.mark.slow),
        pytest.param(0, 3600, id="after a pause"),
    ],
)
async def test_typing_answers_no_question(
    stage: Stage, runtime: Any, served: Any, monkeypatch: Any, calm_s: float, alone_s: float
) -> None:
    served("good")
    runtime.answers = [ECHO, "It said hello."] * 8
    keys = {"\n": "enter", " ": "space"}
    async with stage(runtime, size=(100, 40)) as s:
        for typed in ("yes", "can", "also", "no", "a b", "y\n", "\n", " "):
            monkeypatch.setattr("app.tui.screens.dialogs.CALM_S", calm_s)
            monkeypatch.setattr("app.tui.screens.dialogs.ALONE_S", alone_s)
            await s.ask("What does it say?")
            s.composer.insert("I ")
            await asked(s)
            await s.until(lambda: s.app.screen._shown < math.inf)
            await s.pilot.press(*(keys.get(letter, letter) for letter in typed), "x", "backspace")
            await s.settled()
            assert isinstance(s.app.screen, AskDialog), typed
            assert calls(s)[-1].state == "asked", typed
            assert s.composer.text == f"I {typed}".rstrip("\n"), "it is neither lost nor an answer"
            monkeypatch.setattr("app.tui.screens.dialogs.CALM_S", 0)
            await s.pilot.press("tab", "tab", "enter")  # an answer that was chosen
            await s.answered()
            assert (calls(s)[-1].state, s.composer.text) == ("done", f"I {typed}".rstrip("\n"))


async def test_a_refused_call_costs_a_sentence(stage: Stage, runtime: Any, served: Any) -> None:
    served("good")
    runtime.answers = ['So.\nCALL write {"text": "x"}\nCALL echo {"text": "y"}', "Then not."]
    async with stage(runtime, size=(100, 40)) as s:
        await s.ask("Write it.")
        await asked(s)
        await s.shows("It may change something.")
        assert "Always" not in s.screen_text()
        await s.pilot.press("a")  # is not offered
        assert isinstance(s.app.screen, AskDialog)
        await s.pilot.press("n")
        await s.until(lambda: calls(s)[0].state == "refused")
        await asked(s)
        await s.pilot.press("a")
        await s.answered()
        assert [call.state for call in calls(s)] == ["refused", "done"]
        assert runtime.named("chat")[1][0][-2]["content"] == "The user did not allow this call."
        assert list(json.loads(paths.settings_file().with_name("tools.json").read_text())["always"].values()) == [
            "good/echo"
        ]


async def allowed(s: Any) -> Any:
    """Ask, allow the call, and return it when all is said."""
    await s.ask("Go.")
    await asked(s)
    await s.pilot.press("y")
    await s.answered()
    return calls(s)[-1]


async def test_escape_stops_a_question_and_a_call(stage: Stage, runtime: Any, served: Any) -> None:
    served("hang")
    runtime.answers = [ECHO, ECHO]
    async with stage(runtime, size=(100, 40)) as s:
        await s.ask("Go.")
        await asked(s)
        await s.pilot.press("escape")
        await s.answered()
        assert ([call.state for call in calls(s)], s.last.state) == (["stopped"], "stopped")
        await s.ask("Again.")
        await asked(s)
        await s.pilot.press("y")
        await s.until(lambda: calls(s)[-1].state == "running")
        await s.shows("echo running · round 1 of at most 8 · Esc stops")
        await s.pilot.press("escape")
        await s.answered()
        assert ([call.state for call in calls(s)], s.last.state) == (["stopped"] * 2, "stopped")
        assert len(runtime.named("chat")) == 2


async def test_a_server_that_dies_costs_a_sentence(stage: Stage, runtime: Any, served: Any) -> None:
    served("exit")
    runtime.answers = [ECHO, "It broke."]
    async with stage(runtime, size=(100, 40)) as s:
        call = await allowed(s)
        assert call.state == "failed"
        assert call.result == "exit ended during the call of echo; its last output: segmentation fault of a kind"
        assert s.last.text == "It broke."


async def test_a_loop_of_calls_has_a_limit(
    stage: Stage, runtime: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tools, "MOST_ROUNDS", 3)
    served("good")
    runtime.answers = ['\nCALL echo {"text": 5}\nCALL nothing {}', "Sorry.", ECHO, ECHO, ECHO, "Enough."]
    async with stage(runtime) as s:
        await s.say("Go.")
        assert [call.state for call in calls(s)] == ["failed", "failed"], "what does not fit is not sent"
        assert calls(s)[0].result == "Not called, because of text: 5 is not of type 'string'"
        assert calls(s)[1].result == "There is no tool of this name."
        await s.ask("Go on.")
        await asked(s)
        await s.pilot.press("c")
        await s.answered()
        assert [bool(options.tools) for _, options in runtime.named("chat")[2:]] == [True, True, True, False]
        assert s.last.text == "Enough."


async def test_a_long_result_is_cut_with_a_word_and_counts(stage: Stage, runtime: Any, served: Any) -> None:
    served("endless")
    runtime.answers = [ECHO, "Long."]
    async with stage(runtime, size=(100, 40)) as s:
        call = await allowed(s)
        assert call.result.endswith("characters]")
        assert len(call.result) < 8192 * 0.25 * 3 + 100


async def test_escape_sequences_of_a_tool_never_reach_the_terminal(stage: Stage, runtime: Any, served: Any) -> None:
    served("ansi")
    runtime.answers = [ECHO, "Seen."]
    async with stage(runtime, size=(120, 40)) as s:
        await allowed(s)
        s.app.chat.query_one(CallView).unfold(True)
        await s.shows("[link=https://evil.example]click[/link]")
        assert not set(s.screen_text()) & set("\x1b\x07\x9b\r")
        assert "[link=" in runtime.named("chat")[1][0][-1]["content"]


async def test_calls_are_saved_with_their_chat(stage: Stage, runtime: Any, served: Any, tmp_path: Path) -> None:
    served("good")
    runtime.answers = [ECHO, "It said hello."]
    async with stage(runtime, kept=tmp_path / "history.db") as s:
        told = [await allowed(s)]
    with closing(History(tmp_path / "history.db")) as history:
        (chat,) = history.chats()
        messages = history.messages(chat.id)
    assert list(messages[1].calls) == told
    exported = json.dumps(exchange.document([exchange.to_json(chat, messages)]))
    for text in (exchange.to_markdown(chat, messages), exported):
        (read,) = exchange.read(text, "f")
        assert [list(message.calls) for message in read.messages] == [[], told, []]


async def test_the_screen_of_tools(stage: Stage, runtime: Any, served: Any) -> None:
    served("good", "dies", use=False)
    async with stage(runtime, size=(100, 40)) as s:
        await s.open(ToolsScreen, "ctrl+l")
        await s.shows("✕ failed", "[ ]    echo", "This chat uses no tools.")
        await s.pilot.press("down", "space")
        await s.shows("[x]    echo")
        await s.shows('"required"')  # its schema
        await s.shows("This chat may use 1 tool;")
        await s.pilot.press("a")
        await s.shows("runs unasked")
        await s.pilot.press("down", "a")
        await s.shows("It may change something.")
        await s.pilot.press("n", "up", "a")
        await s.shows("asks first")
        await s.pilot.press("home", "enter")
        await s.shows("This chat may use 2 tools")
        await s.pilot.press("s")
        await s.shows("○ off")
        await s.pilot.press("r")
        await s.until(lambda: s.app.session.tools.box.settled and s.app.session.tools.named(s.app.session.conversation))
        await s.shows("2 tools")


async def test_prompts_and_resources_of_an_imported_server_go_into_the_message(
    stage: Stage, runtime: Any, tmp_path: Path
) -> None:
    theirs = tmp_path / "mcp.json"
    theirs.write_text(json.dumps({"servers": {"mine": {"command": sys.executable, "args": [str(HOSTILE), "good"]}}}))
    async with stage(runtime, size=(100, 40)) as s:
        await s.open(ToolsScreen, "ctrl+l")
        await s.shows("There are no tool servers yet.")
        await s.pilot.press("i")
        await s.pilot.press(*str(theirs), "enter")
        await s.shows("● ready", "mine", "tone · A tone of voice.")
        await s.pilot.press("home", "down", "down", "down", "enter")
        await s.shows("mood")
        await s.pilot.press(*"merry", "enter")
        await s.until(lambda: s.composer.value == "Speak in a merry tone.")
        await s.open(ToolsScreen, "ctrl+l")
        await s.pilot.press("end", "enter")
        await s.until(lambda: "Buy milk." in s.composer.value)
