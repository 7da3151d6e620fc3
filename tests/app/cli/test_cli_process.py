"""The program as a process of its own: imports, pipes, Ctrl-C, terminals, the server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.app.pseudo_terminal import ROOT, PseudoTerminal

PROGRAM = (sys.executable, "-c", "from app.cli.start import main; main()")
SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_program.py")))
VERBS = (
    "run", "pull", "quantize", "list", "ls", "show", "rm", "serve", "eval", "bench", "doctor", "config", "ps", "stop",
    "man",
)  # fmt: skip
ESCAPES = "\x1b]52;c;eA==\x07\x1b]0;title\x07\x9b2J\u202e"
"""What writes the clipboard, the terminal's title, clears the screen, turns a line round."""
HEAVY = ("torch", "transformers", "pydantic", "rich", "numpy", "numba", "huggingface_hub", "textual", "httpx", "psutil")


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, cwd=ROOT, **options)


def finish(process: subprocess.Popen[str], **options: Any) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120, **options)
    return process.returncode, out, err


@pytest.fixture
def small(packed: Path, isolated_home: Path) -> str:
    """A model in the store of the program's own home."""
    shutil.copytree(packed, isolated_home / "models" / "small")
    return "small"


def test_help_imports_nothing_heavy() -> None:
    """One verb after another in a process: what one imports is there after all others, too."""
    verbs = ("", *VERBS, "config get")
    code = (
        "import sys\nfrom app.cli.main import app\n"
        f"for verb in {verbs!r}:\n"
        "    try:\n        app([*verb.split(), '--help'], prog_name='lowbit-chat')\n"
        "    except SystemExit as ended:\n        print(end='\\0' if not ended.code else '\\1')\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    if heavy:\n        sys.exit(f'lowbit-chat {verb} --help imports {heavy}')\n"
    )
    code_, out, err = finish(start(sys.executable, "-c", code))
    assert (code_, err) == (0, "")
    *shown, rest = out.split("\0")
    assert rest == ""
    assert len(shown) == len(verbs)
    for verb, text in zip(verbs, shown, strict=True):
        assert text.startswith(f"Usage: lowbit-chat {verb}".rstrip())


def test_without_a_terminal_there_is_no_ui_but_a_version() -> None:
    code, out, _ = finish(start(*PROGRAM, "--version"))
    assert code == 0
    assert out.startswith("lowbit-chat ")
    code, out, err = finish(start(*PROGRAM))
    assert (code, out) == (1, "")
    assert "needs a terminal" in err


def test_completion_offers_stored_models_and_short_names(small: str, isolated_home: Path) -> None:
    environment = {
        **os.environ,
        "_LOWBIT_CHAT_COMPLETE": "complete_bash",
        "COMP_WORDS": "lowbit-chat run s",
        "COMP_CWORD": "2",
    }
    code, out, _ = finish(start(*PROGRAM, env=environment))
    assert code == 0
    assert out.split() == ["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "smollm3-3b", "small"]


def test_a_pipe_in_and_a_pipe_out(small: str) -> None:
    process = start(*PROGRAM, "run", small, "--raw", "--max-tokens", "3", "--json", stdin=subprocess.PIPE)
    code, out, err = finish(process, input="hello\n")
    assert (code, [line for line in err.splitlines() if "compiling" not in line]) == (0, [])
    assert json.loads(out)["prompt_tokens"] == 5
    assert out.count("\n") == 1


def test_errors_are_one_line_on_standard_error(small: str) -> None:
    code, out, err = finish(start(*PROGRAM, "show", "nothing"))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("lowbit-chat: ")


@pytest.mark.parametrize("way", ["a file's architecture", "all else"])
def test_standard_error_says_nothing_to_the_terminal(way: str, tmp_path: Path) -> None:
    if way != "all else":
        import gguf

        writer = gguf.GGUFWriter(tmp_path / "odd.gguf", f"odd{ESCAPES}")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        command = (*PROGRAM, "quantize", str(tmp_path / "odd.gguf"))
    else:
        code = (
            "import sys, warnings\nfrom app.cli import main, output\nfrom models.progress import Progress\n"
            "def work(**_):\n    warnings.warn(sys.argv[1])\n    with output.Output().progress() as report:\n"
            "        report(Progress(phase='x', done=0, total=1, unit='bytes', message=sys.argv[1]))\n"
            "    sys.stderr.writelines([sys.argv[1]])\n    raise ZeroDivisionError(sys.argv[1])\n"
            "main.app = work\nmain.main()"
        )
        command = (sys.executable, "-c", code, f"odd{ESCAPES}")
    _, out, err = finish(start(*command))
    assert out == ""
    assert err.count("odd␛]52;c;eA==␇␛]0;title␇�2J") == 4 if way == "all else" else "odd" in err
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(err), err


def test_nobody_reads_the_answer(small: str) -> None:
    process = start(*SCRIPTED, "run", small, "hi")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141  # as a shell reports a reader that left
    assert process.stderr is not None
    assert process.stderr.read().splitlines() == ["engine closed"]
    process.stderr.close()


@pytest.mark.parametrize(
    "arguments", [["run", "small", "hi"], ["pull", "some/tiny"], ["pull", "some/tiny", "--json"]], ids=" ".join
)
def test_ctrl_c_is_130(small: str, arguments: list[str]) -> None:
    process = start(*SCRIPTED, *arguments)
    stream = process.stdout if arguments[0] == "run" else process.stderr
    assert stream is not None
    assert stream.read(1)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    assert out.endswith("\n") if arguments[0] == "run" else out == ""


@contextmanager
def on_terminal(*command: str, **environment: str) -> Iterator[PseudoTerminal]:
    terminal = PseudoTerminal(*command, **environment)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize("leave", ["/bye\r", "\x04"], ids=["bye", "Ctrl-D"])
def test_ctrl_c_in_a_conversation_stops_the_answer_and_it_goes_on(small: str, leave: str) -> None:
    with on_terminal(*SCRIPTED, "run", small) as terminal:
        for _ in range(2):
            terminal.until(">>> ")
            terminal.type("count\r")
            terminal.until("3 4 5")
            terminal.process.send_signal(signal.SIGINT)
            terminal.until("stopped")
        terminal.until(">>> ")
        terminal.type(leave)
        terminal.until("engine closed")
        assert terminal.ended() == 0


def test_a_terminal_gets_words_and_no_commands(isolated_home: Path) -> None:
    """On a terminal the program's own colours stay; what is data does not colour anything."""
    code = (
        "import sys\nfrom app.cli import main, output\nfrom models.progress import Progress\n"
        "def work(**_):\n    written = output.Output()\n    written.picture('\\x1b[7mours\\x1b[0m')\n"
        "    with written.progress() as report:\n"
        "        report(Progress(phase='x', done=0, total=1, unit='bytes', message='bars ' + sys.argv[1]))\n"
        "        written.note('meanwhile ' + sys.argv[1])\n"
        "    written.text('text ' + sys.argv[1])\n    written.stream('piece ' + sys.argv[1])\n"
        "    print(input('typed? '))\n    print('end')\n"
        "main.app = work\nmain.main()"
    )
    with on_terminal(sys.executable, "-c", code, ESCAPES) as terminal:
        terminal.until("\x1b[7mours")
        for word in ("meanwhile ", "text ", "piece ", "typed? "):
            terminal.until(word)
        terminal.type("\x1b]0;typed\x07\r")
        terminal.until("end")
        assert terminal.ended() == 0
        assert terminal.seen.count("␛]52;c;eA==␇␛]0;title␇�2J") >= 4
        assert "\x1b]" not in terminal.seen
        assert not {"\x07", "\x9b", "\u202e"} & set(terminal.seen)


def test_plain_output_has_no_escape_codes(isolated_home: Path) -> None:
    with on_terminal(*SCRIPTED, "pull", "some/tiny", NO_COLOR="1") as terminal:
        terminal.until("downloading")
        terminal.until("of 1.0 GB")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 130
        assert "\x1b" not in terminal.seen
    talk = "from pathlib import Path; from app.cli.repl import *\n"
    talk += "with line_history(Path('lines')): print(Repl(None, Output())._typed_line('>>> ').upper())"
    with on_terminal(sys.executable, "-c", talk, NO_COLOR="1") as terminal:
        terminal.until(">>> ")
        terminal.type("hello\r")
        terminal.until("HELLO")
        assert terminal.ended() == 0
        assert "\x1b" not in terminal.seen


def test_serve_answers_and_ends(small: str) -> None:
    import httpx

    process = start(*PROGRAM, "serve", "--port", "0", "--token", "a-long-enough-token", "--model", small)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "serving http" in line:
            break
    url = lines[-1].split("serving ")[1].split(";")[0]
    assert httpx.get(f"{url}/models").status_code == 401
    headers = {"Authorization": "Bearer a-long-enough-token"}
    names = [entry["id"] for entry in httpx.get(f"{url}/models", headers=headers).json()["data"]]
    assert small in names
    body = {"model": small, "prompt": "hello", "max_tokens": 3}
    answer = httpx.post(f"{url}/completions", headers=headers, json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 5
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_serve_beyond_loopback_needs_a_token() -> None:
    code, out, err = finish(start(*PROGRAM, "serve", "--host", "0.0.0.0", "--port", "0"))
    assert (code, out) == (1, "")
    assert "token" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("list",), ("man",), ("run", "--help")], ids=lambda one: one[0])
def test_a_reader_that_left_is_no_error(isolated_home: Path, command: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*PROGRAM, *command, stdout=write)
    os.close(write)
    code, _, err = finish(process)
    assert (code, err) == (141, "")
