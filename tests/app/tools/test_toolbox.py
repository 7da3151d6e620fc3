"""Servers that behave and servers that do not: what each costs, and that nothing is left running."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.tools import pipe as pipe_module
from app.tools import server as server_module
from app.tools.config import ServerConfig, ToolsError
from app.tools.toolbox import Toolbox

HOSTILE = Path(__file__).parent / "hostile.py"
SECRET = "s3cr3t-value"
MARK = uuid.uuid4().hex
"""In the environment of the servers that this process starts; others may run the same ones."""


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toolbox]]:
    """Starts servers of `hostile.py`, and ends them."""
    monkeypatch.setattr(server_module, "START_S", 20.0)
    monkeypatch.setattr(server_module, "CALL_S", 1.5)
    monkeypatch.setattr(pipe_module, "END_S", 0.3)
    opened: list[Toolbox] = []

    def start(*kinds: str, settled: bool = True) -> Toolbox:
        made = Toolbox(
            [
                ServerConfig(
                    name=kind, command=sys.executable, args=(str(HOSTILE), kind), env={"TOKEN": SECRET, "MARK": MARK}
                )
                for kind in kinds
            ]
        )
        opened.append(made)
        made.open()
        deadline = time.monotonic() + 30
        while settled and time.monotonic() < deadline and any(one.state in ("off", "starting") for one in made.servers):
            time.sleep(0.02)
        return made

    yield start
    for one in opened:
        one.close()
    deadline = time.monotonic() + 5  # what was killed takes a moment to be gone
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left() == []


def left() -> list[int]:
    """Processes that still run of those that servers here were started as, or started themselves."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == MARK and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def called(box: Toolbox, text: str = "hello") -> tuple[str, bool]:
    found = box.call(box.tools[0], {"text": text}).result(20)
    return found.text, found.failed


def test_a_server_that_behaves(box: Callable[..., Toolbox]) -> None:
    tools = box("good")
    (server,) = tools.servers
    assert (server.state, server.problem) == ("ready", "")
    assert [(tool.name, tool.reads) for tool in server.tools] == [("echo", True), ("write", False)]
    assert called(tools) == ("hello", False)
    assert called(tools, "fail") == ("fail", True)
    words: list[str] = []
    assert tools.call(tools.tools[0], {"text": "slow"}, words.append).result(20).text == "slow"
    assert words == ["1 of 3", "2 of 3", "3 of 3"]
    (prompt,) = tools.prompts
    assert prompt.arguments == (("mood", False),)
    assert tools.prompt(prompt, {"mood": "merry"}).result(20) == "Speak in a merry tone."
    assert tools.resource(tools.resources[0]).result(20) == "Buy milk."
    tools.stop("good").result(20)
    assert server.state == "off"
    tools.restart("good").result(20)
    deadline = time.monotonic() + 20  # it returns when the server is about to be started
    while not left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left()


def test_secrets_of_the_file_come_back_hidden(box: Callable[..., Toolbox]) -> None:
    assert called(box("good"), f"the token is {SECRET}")[0] == "the token is •••"


OUTCOMES = {
    "wrong-json": "wrong-json answered the call of echo in a form that MCP does not have",
    "hang": "hang said nothing for 1.5 s in the call of echo; it was stopped",
    "exit": "exit ended during the call of echo; its last words: segmentation fault of a kind",
    "chatter": "chatter said nothing for 1.5 s in the call of echo; it was stopped",
    "one-line": "one-line ended during the call of echo; its last words: the server sent a message of more than "
    "4,194,304 bytes, and was ended",
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_hostile_call_costs_a_sentence(box: Callable[..., Toolbox], kind: str) -> None:
    tools = box(kind)
    with pytest.raises(ToolsError) as caught:
        called(tools)
    assert str(caught.value) == OUTCOMES[kind]


@pytest.mark.parametrize("kind", ["lookahead", "recursion", "repeat", "child", "changing"])
def test_an_odd_server_works(box: Callable[..., Toolbox], kind: str) -> None:
    assert called(box(kind)) == ("hello", False)


def test_a_list_that_changes_is_read_again(box: Callable[..., Toolbox]) -> None:
    tools = box("changing")
    before = tools.tools[0]
    called(tools)
    deadline = time.monotonic() + 10
    while tools.tools[0].name == before.name and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (before.name, tools.tools[0].name) == ("echo1", "echo2")


def test_an_endless_result_is_cut(box: Callable[..., Toolbox]) -> None:
    text, _ = called(box("endless"))
    assert len(text) < 210_000
    assert text.endswith("[cut: these are the first 200,000 of 1,000,000 characters]")


def test_names_that_look_alike_are_left_out(box: Callable[..., Toolbox]) -> None:
    tools = box("unicode")
    assert [tool.name for tool in tools.tools] == ["echo"]
    assert len(tools.servers[0].notes) == 3
    assert "\u202e" not in tools.tools[0].description


def test_no_escape_sequence_comes_through(box: Callable[..., Toolbox]) -> None:
    text, _ = called(box("ansi"))
    assert not set(text) & set(map(chr, [*range(9), *range(11, 32), 127, *range(128, 160)]))
    assert "[link=https://evil.example]" in text  # as text


def test_a_server_that_cannot_start_is_a_sentence(box: Callable[..., Toolbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "START_S", 3.0)
    tools = box("hang-at-start", "lies")
    assert [one.problem for one in tools.servers] == [
        "hang-at-start did not start within 3 s",
        "lies answered the list of tools in a form that MCP does not have",
    ]
    missing = Toolbox([ServerConfig(name="gone", command="/no/such/program")])
    missing.open()
    while not missing.servers or missing.servers[0].state in ("off", "starting"):
        time.sleep(0.02)
    assert missing.servers[0].problem == "gone can't be started: there is no program program"
    missing.close()


def test_a_call_that_is_cancelled_ends_at_once(box: Callable[..., Toolbox]) -> None:
    tools = box("hang")
    call = tools.call(tools.tools[0], {"text": "x"})
    time.sleep(0.2)
    begin = time.monotonic()
    call.cancel()
    tools.close()
    assert time.monotonic() - begin < 6


def test_tools_of_the_same_name_are_told_apart(box: Callable[..., Toolbox]) -> None:
    tools = box("good", "child")
    keys = [tool.key for tool in tools.tools]
    assert [one.name for one in tools.named(keys)] == ["good_echo", "good_write", "child_echo", "child_write"]
    assert [one.name for one in tools.named(["good/echo", "child/write"])] == ["echo", "write"]
