from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app import paths
from app.chat.commands import COMMANDS, completions
from app.cli.output import Output
from app.cli.repl import Repl, line_history
from app.cli.serve import result_of
from app.cli.talk import Talk
from app.errors import ContextLengthError
from app.protocol import ChatDelta, ChatOptions
from app.settings import SAMPLING_DEFAULTS, load
from runtime.wire.answers import Status, Timings
from tests.app.pseudo_terminal import PseudoTerminal


class ScriptedModel:
    """Answers the n-th prompt with the n-th text, word by word, and keeps what it was asked."""

    longest = 50

    def __init__(self, *texts: str, finish: str = "stop") -> None:
        self.texts, self.finish = list(texts), finish
        self.asked: list[Any] = []
        self.options: list[ChatOptions] = []

    async def chat(self, messages: Sequence[Any], options: ChatOptions) -> AsyncIterator[ChatDelta]:
        if len(messages[-1]["content"]) > self.longest:
            raise ContextLengthError("too long", status=400)
        self.asked.append([(message["role"], message["content"]) for message in messages])
        async for delta in self._answer(options):
            yield delta

    async def complete(self, text: str, options: ChatOptions) -> AsyncIterator[ChatDelta]:
        self.asked.append(text)
        async for delta in self._answer(options):
            yield delta

    async def _answer(self, options: ChatOptions) -> AsyncIterator[ChatDelta]:
        self.options.append(options)
        for word in self.texts.pop(0).split(" "):
            yield ChatDelta(text=word)
        timings = Timings(
            ttft_s=0.25, prefill_tokens_per_s=9.0, decode_tokens_per_s=8.0, prompt_tokens=7, cached_tokens=3,
            completion_tokens=5, k_chunk=None, slowdown_percent=None, speculation=None,
        )  # fmt: skip
        yield ChatDelta(text="", finish_reason=self.finish, timings=timings)

    async def aclose(self) -> None:
        pass


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], isolated_home: Path) -> Callable[..., tuple[str, str]]:
    """Type lines into a conversation; returns what was written to standard output and standard error."""

    def talk(
        model: ScriptedModel, *lines: str | type[BaseException], system: str = "", raw: bool = False
    ) -> tuple[str, str]:
        typed = iter(lines)

        def read(_prompt: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        status = Status(
            state="ready", model="scripted", backend="cpu", reason="a test", kv="int4", kv_bytes=1 << 20, context=100
        )
        settings = load({"system_prompt": system})
        talking = Talk(model, status, settings, {}, Output(), raw=raw, count=lambda text: len(text.split()))  # type: ignore[arg-type]
        try:
            Repl(talking, Output(), read=read).loop()
        finally:
            result_of(talking.close())
        captured = capsys.readouterr()
        return captured.out, captured.err

    return talk


Typed = Callable[..., tuple[str, str]]


def test_answers_become_part_of_the_conversation(talk: Typed) -> None:
    model = ScriptedModel("I am well", "Good bye")
    out, _ = talk(model, "How are you?", "", "Bye", "/bye", "never read", system="be kind")
    assert out == "Iamwell\nGoodbye\n"
    assert model.asked == [
        [("system", "be kind"), ("user", "How are you?")],
        [("system", "be kind"), ("user", "How are you?"), ("assistant", "Iamwell"), ("user", "Bye")],
    ]
    assert model.options[0].chat is None
    model = ScriptedModel("a", "b")
    talk(model, "one", "/clear", "two")
    assert model.asked == [[("user", "one")], [("user", "two")]]


def test_set_changes_what_follows(talk: Typed) -> None:
    model = ScriptedModel("a", "b", "c")
    changes = ("temperature 0.25", "max_tokens 9", "seed 4", "stop END OF IT", "system be brief")
    back = ("/set max_tokens auto", "/set stop", "/set system")
    _, err = talk(model, *(f"/set {change}" for change in changes), "one", *back, "two")
    first, second = model.options
    assert (first.temperature, first.max_tokens, first.seed) == (0.25, 9, 4)
    assert first.stop == ("END OF IT",)
    assert (second.max_tokens, second.stop) == (None, None)
    assert model.asked[0][0] == ("system", "be brief")
    assert model.asked[1][0][0] == "user"
    assert "use /set" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set", "use /set NAME VALUE"),
        ("/set warmth 3", "use /set NAME VALUE"),
        ("/set temperature", "use /set NAME VALUE"),
        ("/set temperature warm", "it must be a number from 0 to 2"),
        ("/set temperature -1", "it must be a number from 0 to 2"),
        ("/set top_k 1.5", "it must be a whole number from 0"),
        ("/dance", "no command /dance; /help lists them"),
        ("/modle demo", "no command /modle; did you mean /model?"),
        ("/save", "use /save FILE"),
        ("/stats", "no answer yet"),
        ("x" * 60, "too long"),
    ],
)
def test_what_goes_wrong_is_told_and_the_talk_goes_on(talk: Typed, line: str, said: str) -> None:
    model = ScriptedModel("fine")
    out, err = talk(model, line, "hello")
    assert said in err
    assert out == "fine\n\n"
    assert model.options[-1].temperature == SAMPLING_DEFAULTS["temperature"]
    assert model.asked == [[("user", "hello")]]


def test_show_stats_and_help(talk: Typed) -> None:
    out, _ = talk(ScriptedModel("fine"), "/show", "hello", "/stats", "/help")
    assert "model               scripted" in out
    assert "cpu (a test)" in out
    assert "max_tokens          auto" in out
    assert "first token after 0.25 s, 8.0 tokens/s; 7 prompt tokens (3 reused), 5 generated; context 12 of 100" in out
    assert all(f"{command.usage} " in out and command.help in out for command in COMMANDS)


def test_prompts_come_from_files(talk: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, project = paths.prompts_dir(), tmp_path / "project"
    monkeypatch.chdir(tmp_path)
    files = {
        own / "review.md": "Review $ARGUMENTS, briefly.",
        own / "model.md": "A name that is taken.",
        own / "empty.md": "",
        own / "not text.md": b"\xff",
        project / ".claude/skills/review/SKILL.md": "The user's own comes first.",
        project
        / ".agents/skills/x/SKILL.md": "---\nname: Plan It\ndescription: >-\n  Makes\n  a plan.\n---\n# Plan\n\nPlan.",
        tmp_path / "outside/SKILL.md": "Secret.",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (project / ".claude/skills/outside").symlink_to(tmp_path / "outside")
    monkeypatch.chdir(project)
    model = ScriptedModel("a", "b")
    out, err = talk(model, "/help", "/review x y", "/plan-it a trip", "/outside", "/empty", "/revew")
    assert "/review [TEXT]     Review $ARGUMENTS, briefly." in out
    assert "/plan-it [TEXT]    Makes a plan." in out
    assert "taken" not in out
    assert "no command /outside" in err
    assert f"{own / 'empty.md'} has no text" in err
    assert "did you mean /review?" in err
    assert [asked[-1] for asked in model.asked] == [
        ("user", "Review x y, briefly."),
        ("user", "# Plan\n\nPlan.\n\na trip"),
    ]
    assert completions("/pl", ()) == [("/plan-it ", "/plan-it [TEXT]    Makes a plan.")]


def test_a_conversation_is_saved_and_loaded_and_other_slashes_are_sent(talk: Typed, tmp_path: Path) -> None:
    file, model = tmp_path / "talk.md", ScriptedModel("a", "b", "c", "d")
    _, err = talk(
        model, "/save nothing.md", "one", f"/save {file}", f"/save {file}", "// a comment", "/etc/hosts is what?"
    )
    assert "nothing to save" in err
    assert "exists already: give another name" in err
    assert [asked[-1][1] for asked in model.asked] == ["one", "// a comment", "/etc/hosts is what?"]
    assert file.stat().st_mode & 0o777 == 0o600
    talk(model, f"/load {tmp_path / 'gone.md'}", f"/load {file}", "two")
    assert model.asked[-1] == [("user", "one"), ("assistant", "a"), ("user", "two")]


def test_several_lines_between_triple_quotes(talk: Typed) -> None:
    model = ScriptedModel("a", "b")
    talk(model, '"""one', "two", 'three"""', '"""all in one"""')
    assert [asked[-1][1] for asked in model.asked] == ["one\ntwo\nthree", "all in one"]


def test_raw_lines_stand_alone(talk: Typed) -> None:
    model = ScriptedModel("a", "b")
    talk(model, "one", "two", raw=True)
    assert model.asked == ["one", "two"]
    assert model.options[0].stop is None


def test_ctrl_c_at_the_prompt_goes_on_and_is_given_back_after_an_answer(talk: Typed) -> None:
    before = signal.getsignal(signal.SIGINT)
    model = ScriptedModel("a")
    _, err = talk(model, KeyboardInterrupt, "one")
    assert "/bye or Ctrl-D leaves" in err
    assert len(model.asked) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_cut_answer_is_told(talk: Typed) -> None:
    _, err = talk(ScriptedModel("a", finish="length"), "one")
    assert "context of 100 tokens is full" in err
    _, err = talk(ScriptedModel("a", finish="length"), "/set max_tokens 1", "one")
    assert "is full" not in err
    _, err = talk(ScriptedModel("a", finish="loop"), "one")
    assert "stopped: it only repeated itself" in err


def test_lines_are_remembered_for_the_next_conversation(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    file = tmp_path / "home" / "lines"
    with line_history(file):
        readline.add_history("why is the sky blue?")
    assert file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with line_history(file):
        assert readline.get_history_item(1) == "why is the sky blue?"
    readline.clear_history()
    with line_history(tmp_path):  # a folder: it is gone without
        pass


def test_a_document_is_attached(talk: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("the lamp burns oil")
    (tmp_path / "lamps").mkdir()
    (tmp_path / "lamps" / "a.txt").write_text("the lamp burns oil")
    (tmp_path / "small").mkdir()
    for name in ("a", "b"):
        (tmp_path / "small" / f"{name}.txt").write_text(f"the lamp {name}")
    monkeypatch.setattr("app.documents.reader.MAX_TOGETHER", 2)
    for number in range(3):
        (tmp_path / "lamps" / f"{number}.txt").write_text("Nothing.")
    model = ScriptedModel("one", "two", "three", "four")
    model.longest = 5000
    attach = [f"/attach {tmp_path / name}" for name in ("gone", "notes.txt", "lamps", "small")]
    asked = ["Which oil?", attach[2], "What burns in the lamp?", "Which router?", attach[3], "b?"]
    _, err = talk(model, "/attach", *attach[:2], *asked)
    assert "use /attach PATH" in err
    assert "gone can't be opened: No such file or directory" in err
    assert "notes.txt: 4 tokens" in err
    assert "small: 2 files, 6 tokens" in err
    assert "lamps (4 files, about" in err
    assert "is too long to be sent" in err
    said = [messages[-1][1] for messages in model.asked]
    assert said[0] == "notes.txt:\n````\nthe lamp burns oil\n````\n\nWhich oil?"
    assert '<passage from="lamps/a.txt, line 1">' in said[1]
    assert "from lamps/a.txt, line 1" in err
    assert said[2].startswith("A search of the attached documents found nothing")
    assert said[3].endswith("a.txt:\n````\nthe lamp a\n````\n\nb.txt:\n````\nthe lamp b\n````\n\nb?")
    assert "nothing about this was found" in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    "paste", ["\x1b[200~one\rtwo\r\rthree\x1b[201~\r", "one\rtwo\r\rthree\r"], ids=["marked", "bare"]
)
def test_lines_that_are_pasted_are_one_prompt(paste: str) -> None:
    code = "from app.cli.repl import Repl\nrepl = Repl(None, None)\n" + "print(repr(repl._text()))\n" * 2
    terminal = PseudoTerminal(sys.executable, "-c", code)
    try:
        terminal.until("\x1b[?2004h", ">>> ")  # the terminal is asked to mark pastes
        terminal.type(paste)
        terminal.until("'one\\ntwo\\n\\nthree'")
        terminal.type("/set a b\r")
        terminal.until("'/set a b'")
    finally:
        terminal.close()
