"""`run --mcp`: what is called, asked, refused, and left running."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cli import tools as run_tools
from app.cli.errors import CliError
from app.cli.output import Output
from app.cli.tools import RunTools, converse
from runtime.engine.generation import Piece, Usage
from runtime.text.reasoning import switch
from runtime.text.sampling import SamplingOptions

HOSTILE = Path(__file__).parents[1] / "tools" / "hostile.py"
USAGE = Usage(
    prompt_tokens=1, cached_tokens=0, completion_tokens=1, ttft_s=0.1, prefill_s=0.1, decode_tokens_per_s=1.0
)  # fmt: skip


class Scripted:
    """An engine that says what it is told, one text for each prompt."""

    context = 4096
    chat_stops = ()

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self.prompts: list[tuple[list[Mapping[str, Any]], list[str]]] = []

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), variables: object = None
    ) -> list[int]:
        self.prompts.append((list(messages), [tool.name for tool in tools]))
        self.variables = variables
        return [1]

    def reasoning_opened(self, _prompt: Sequence[int]) -> str:
        return "<think>\n" if self.variables else ""

    def generate(self, _prompt: Any, _options: Any, _cancelled: Any) -> Iterator[Piece]:
        text = self._texts.pop(0)
        for at in range(0, len(text), 5):
            yield Piece(text=text[at : at + 5], token=1)
        yield Piece(text="", finish_reason="stop", usage=USAGE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one server that behaves."""
    made = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": [str(HOSTILE), "good"]}
    made.write_text(json.dumps({"mcpServers": {"good": server}}))
    return made


def call(name: str, text: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': text}})}</tool_call>"


def talk(engine: Scripted, tools: RunTools) -> Any:
    said: list[str] = []
    asked = [{"role": "user", "content": "Go."}]
    found = converse(engine, asked, SamplingOptions(), lambda: False, said.append, tools)  # type: ignore[arg-type]
    tools.close()
    assert "".join(said).split() == found.text.split()
    return found


def test_a_tool_that_may_runs_unasked_and_others_do_not(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Scripted(f"So. {call('echo', 'hello')} {call('write', 'x')}", "Done.")
    found = talk(engine, RunTools(file, ["echo"], Output()))
    assert [one["result"] for one in found.calls] == ["hello", "The user did not allow this call."]
    assert found.text.split() == ["So.", "Done."]
    assert engine.prompts[0][1] == ["echo", "write"]
    assert [message["role"] for message in engine.prompts[1][0]] == ["user", "assistant", "tool", "tool"]
    told = capsys.readouterr().err
    assert 'good · echo {"text": "hello"}\n' in told
    assert "not allowed; --yes-tools write allows it" in told


@pytest.mark.parametrize(("answers", "results"), [("yy", 2), ("c", 2), ("nn", 0)])
def test_the_terminal_is_asked(file: Path, monkeypatch: pytest.MonkeyPatch, answers: str, results: int) -> None:
    monkeypatch.setattr(run_tools, "at_a_terminal", lambda: True)
    typed = iter(answers)
    tools = RunTools(file, [], Output(), read=lambda _: next(typed))
    found = talk(Scripted(call("echo", "hello"), call("echo", "hello"), "Done."), tools)
    assert [one["result"] for one in found.calls].count("hello") == results
    assert next(typed, None) is None


def test_reasoning_that_the_prompt_began_is_shown_from_its_tag_on(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    asked, sampling = [{"role": "user", "content": "Go."}], SamplingOptions()
    engine, tools = Scripted("Hm.\n</think>\nYes."), RunTools(None, [], Output())
    found = converse(engine, asked, sampling, lambda: False, said.append, tools, switch("on"))  # type: ignore[arg-type]
    assert "".join(said) == found.text == "<think>\nHm.\n</think>\nYes."
    assert engine.variables == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}


def test_a_loop_of_calls_has_a_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tools, "MOST_ROUNDS", 2)
    engine = Scripted(*[call("echo", "x")] * 2, "Enough.")
    found = talk(engine, RunTools(file, ["good/echo"], Output()))
    assert (len(found.calls), found.text.split()) == (2, ["Enough."])
    assert engine.prompts[2][1] == []


def test_an_unknown_tool_and_a_broken_file_are_clear_errors(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--yes-tools names erase, which no server has; the tools are: echo, write"):
        RunTools(file, ["erase"], Output())
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(CliError, match="lists no servers"):
        RunTools(broken, [], Output())
