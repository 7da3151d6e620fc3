"""Servers that behave and servers that do not: what each costs, and that nothing is left running."""

from __future__ import annotations

import re
import subprocess
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
from app.tools.toolbox import Toolbox, model_name

sys.path.insert(0, str(Path(__file__).parent))
from hostile import LONG, ODD

HOSTILE = Path(__file__).parent / "hostile.py"
SECRET = "s3cr3t-value"
MARK = uuid.uuid4().hex
"""In the environment of the servers that this process starts; others may run the same ones."""


Box = Callable[..., Toolbox]


def wait_for(predicate: Callable[[], object]) -> None:
    """Wait until something holds, 30 s at most."""
    deadline = time.monotonic() + 30
    while not predicate() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toolbox]]:
    """Starts servers of `hostile.py`, and ends them."""
    monkeypatch.setattr(server_module, "START_S", 20.0)
    monkeypatch.setattr(server_module, "CALL_S", 1.5)
    monkeypatch.setattr(pipe_module, "END_S", 0.3)
    opened: list[Toolbox] = []

    def start(*kinds: str, settled: bool = True) -> Toolbox:
        env = {"TOKEN": SECRET, "MARK": MARK}
        configs = [
            ServerConfig(name=kind, command=sys.executable, args=(str(HOSTILE), kind), env=env) for kind in kinds
        ]
        made = Toolbox(configs)
        opened.append(made)
        made.open()
        wait_for(lambda: not settled or all(one.state not in ("off", "starting") for one in made.servers))
        return made

    yield start
    for one in opened:
        one.close()
    wait_for(lambda: not left())  # what was killed takes a moment to be gone
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


def test_a_server_that_behaves(box: Box) -> None:
    tools = box("good")
    (server,) = tools.servers
    assert (server.state, server.problem) == ("ready", "")
    assert [(tool.name, tool.reads) for tool in server.tools] == [("echo", True), ("write", False)]
    assert called(tools) == ("hello", False)
    assert called(tools, "fail") == ("fail", True)
    assert called(tools, f"the token is {SECRET}")[0] == "the token is •••", "secrets of the file come back hidden"
    words: list[str] = []
    assert tools.call(tools.tools[0], {"text": "slow"}, words.append).result(20).text == "slow"
    assert words == ["1 of 3", "2 of 3", "3 of 3"]
    (prompt,) = tools.prompts
    assert prompt.arguments == (("mood", False),)
    assert tools.prompt(prompt, {"mood": "merry"}).result(20) == "Speak in a merry tone."
    assert tools.resource(tools.resources[0]).result(20) == "Buy milk."
    tools.stop("good").result(20)
    assert server.state == "off"


OUTCOMES = {
    "wrong-json": """wrong-json answered the call of echo with something unreadable: """
    '{"jsonrpc": "2.0", "id": 5, "result": {"content": [',
    "hang": "hang was silent for 0.5 s in the call of echo; it was stopped",
    "exit": "exit ended during the call of echo; its last output: segmentation fault of a kind",
    "chatter": "chatter was silent for 0.5 s in the call of echo; it was stopped",
    "one-line": "one-line ended during the call of echo; its last output: the server sent a message of more than "
    "4,194,304 bytes, and was stopped",
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_hostile_call_costs_a_sentence(box: Box, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = box(kind)
    if "was silent" in OUTCOMES[kind]:
        monkeypatch.setattr(server_module, "CALL_S", 0.5)
    with pytest.raises(ToolsError) as caught:
        called(tools)
    assert str(caught.value) == OUTCOMES[kind]


def said(text: str) -> str:
    return f'{{"jsonrpc": "2.0", "id": @, "result": {{"content": [{{"type": "text", "text": "{text}"}}]}}}}'


MENDED = {
    "half a pair": (said(r"first \ud83d\u2026"), "first \ufffd\u2026"),
    "wrong UTF-8": (said("caf\xe9"), "caf\ufffd"),
    "a mark": (f"\xef\xbb\xbf{said('x')}", "x"),
    "NUL": (f"\0{said('x')}\0", "x"),
    "UTF-16": ("\xff\xfe" + "".join(f"{one}\0" for one in said("x")), "x"),
    "NaN": ('{"jsonrpc": "2.0", "id": @, "result": {"content": [], "structuredContent": {"a": NaN}}}', '{"a": null}'),
    "an id as text": (said("x").replace("@", '"@"'), "x"),
    "an id as a fraction": (said("x").replace("@", "@.0"), "x"),
    "no version": (said("x").replace('"jsonrpc": "2.0", ', ""), "x"),
    "a list of messages": (f"[{said('x')}]", "x"),
    "words before it": (f"Calling {{now}}\n{said('x')}", "x"),
    "an error of nobody": (f'{{"jsonrpc": "2.0", "id": null, "error": {{}}}}\n{said("x")}', "x"),
    "odd contents": (said("x").replace("[{", '[null, {"type": "text"}, {'), "[None, not shown]\n[text, not shown]\nx"),
}
UNREAD = r"^raw answered the call of echo with something unreadable: "
UNREADABLE = {
    "cut": said("x")[:60],
    "nested": said("x").replace('"x"', "[" * 100_000),
    "a control character": said("\x1b[2J"),
    "a text": '{"jsonrpc": "2.0", "id": @, "result": "hello"}',
    "its id at the end": '{"result": {"content": [x], "id": 777}, "jsonrpc": "2.0", "id": @}',
    "no id": '{"jsonrpc": "2.0", "result": {"content": [',
    "over many lines": said("x").replace(", ", ",\n"),
}
DOUBTFUL = {
    "words": "That did not work.",
    "another's id": said("x").replace("@", "999"),
    "an error of nobody": '{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "?"}}',
}
"""What may or may not be the answer."""


def test_an_answer_is_mended_or_an_error_of_its_call_alone(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CALL_S", 60.0)
    monkeypatch.setattr(pipe_module, "GARBLED_S", 30.0)
    tools = box("raw")
    for kind, (line, text) in MENDED.items():
        assert (kind, called(tools, line)[0]) == (kind, text)
    for line in UNREADABLE.values():
        with pytest.raises(ToolsError, match=UNREAD):
            called(tools, line)
    monkeypatch.setattr(pipe_module, "GARBLED_S", 0.1)
    for line in DOUBTFUL.values():
        with pytest.raises(ToolsError, match=UNREAD):
            called(tools, line)
    assert called(tools, said("still there"))[0] == "still there"


def test_one_odd_tool_costs_no_other(box: Box) -> None:
    tools = box("odd")
    (server,) = tools.servers
    used = [entry["name"] for entry in ODD[:8]]
    assert [tool.name for tool in tools.tools] == used
    assert all(tool.schema["type"] == "object" and not tool.reads for tool in tools.tools)
    assert [tool.schema.get("properties") for tool in tools.tools[:4]] == [{}, None, None, {"a": {"properties": {}}}]
    assert max(len(tool.description) for tool in tools.tools) < 3000
    for note, words in zip(
        server.notes,
        (
            'its schema is of type "array", and arguments are an object',
            'its schema is not an object but "object"',
            "its name has more than 200 characters",
            *("has no name",) * 3,
            "the tool none is listed twice",
        ),
        strict=True,
    ):
        assert words in note
    names = {one.tool.name: one.name for one in tools.named([tool.key for tool in tools.tools])}
    assert names["list"] == "list"
    assert names[LONG].startswith(LONG[:50])
    assert names["user profile/update"].startswith("user_profile_update_")
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names.values())
    assert tools.call(tools.tools[6], {"text": "hello"}).result(20).text == "hello"


@pytest.mark.parametrize("kind", ["lookahead", "recursion", "repeat", "child", "daemon", "changing"])
def test_an_odd_server_works(box: Box, kind: str) -> None:
    assert called(box(kind)) == ("hello", False)


def test_a_list_that_changes_is_read_again(box: Box) -> None:
    tools = box("changing")
    before = tools.tools[0]
    called(tools)
    wait_for(lambda: tools.tools[0].name != before.name)
    assert (before.name, tools.tools[0].name) == ("echo1", "echo2")
    with pytest.raises(ToolsError, match=r"^changing has changed or withdrawn echo1; it was not called$"):
        tools.call(before, {"text": "x"}).result(20)


def test_an_endless_result_is_cut(box: Box) -> None:
    text, _ = called(box("endless"))
    assert len(text) < 210_000
    assert text.endswith("[cut: these are the first 200,000 of 1,000,000 characters]")


def test_names_that_look_alike_are_left_out(box: Box) -> None:
    tools = box("unicode")
    assert [tool.name for tool in tools.tools] == ["echo"]
    assert len(tools.servers[0].notes) == 3
    assert "\u202e" not in tools.tools[0].description


def test_no_escape_sequence_comes_through(box: Box) -> None:
    text, _ = called(box("ansi"))
    assert not set(text) & set(map(chr, [*range(9), *range(11, 32), 127, *range(128, 160)]))
    assert "[link=https://evil.example]" in text  # as text


def test_a_server_that_cannot_start_is_a_sentence(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "START_S", 1.0)
    assert box("hang-at-start").servers[0].problem == "hang-at-start did not start within 1 s"
    missing = Toolbox([ServerConfig(name="gone", command="/no/such/program")])
    missing.open()
    wait_for(lambda: missing.servers and missing.servers[0].state not in ("off", "starting"))
    assert missing.servers[0].problem == "gone can't be started: there is no program program"
    missing.close()


def test_a_call_that_is_cancelled_ends_at_once(box: Box) -> None:
    tools = box("hang")
    call = tools.call(tools.tools[0], {"text": "x"})
    time.sleep(0.2)
    begin = time.monotonic()
    call.cancel()
    tools.close()
    assert time.monotonic() - begin < 6


def test_what_a_killed_program_started_ends_too(box: Box) -> None:
    code = f"""
import time
from app.tools.config import ServerConfig
from app.tools.toolbox import Toolbox
box = Toolbox([ServerConfig(name="a", command={sys.executable!r}, args=({str(HOSTILE)!r}, "daemon"),
                            env={{"MARK": {MARK!r}}})])
box.open()
while not box.settled:
    time.sleep(0.02)
print(box.servers[0].state, flush=True)
time.sleep(600)
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert len(left()) == 3  # what watches it, the server, and what it left
        program.kill()
    # that nothing is left is what `box` looks at


def test_tools_of_several_servers_are_told_apart(box: Box) -> None:
    tools = box("good", "child")
    keys = [tool.key for tool in tools.tools]
    names = ["good_echo", "good_write", "child_echo", "child_write"]
    assert [one.name for one in tools.named(keys)] == names
    tools.stop("good").result(20)
    assert [one.name for one in tools.named(keys)] == names[2:]  # nobody gets the name of what is gone


def test_no_server_takes_the_name_of_another_s_tool() -> None:
    pairs = {
        *(("files", "read_file"), ("x", "files_read_file"), ("files_read", "file"), ("files", "read_file_")),
        *(("a b", "c"), ("a_b", "c"), ("a.b", "c"), ("a", "b_c"), ("é", "c"), ("ü", "c"), ("a", "b c")),
        *(("s", "t" * 80), ("s", "t" * 81), ("s" * 40, "t" * 30), ("s", "a/b"), ("s", "a_b"), ("s", "a b")),
    }
    pairs |= {(server, model_name(server, tool).partition("_")[2]) for server, tool in pairs}  # which imitate them
    names = {model_name(*pair) for pair in pairs}
    assert len(names) == len(pairs)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names)
    assert model_name("files", "read_file") == "files_read_file"
