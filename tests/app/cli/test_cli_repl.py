from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.attachments import Attachments
from app.cli.output import Output
from app.cli.repl import Repl, line_history
from app.cli.tools import RunTools
from runtime.backends.decoder import DecoderOptions
from runtime.engine.generation import Piece, Usage
from runtime.errors import ContextOverflowError
from runtime.text.sampling import SamplingOptions


class ScriptedEngine:
    """Answers the n-th prompt with the n-th text, word by word, and keeps what it was asked."""

    name = "scripted"
    reason = "a test"
    context = 100
    chat_stops = ("\nUser:",)
    longest = 50

    def __init__(self, *texts: str, note: str | None = None, finish: str = "stop") -> None:
        self.texts = list(texts)
        self.finish = finish
        self.asked: list[Any] = []
        self.options: list[SamplingOptions] = []
        self.tokenizer = SimpleNamespace(note=note, encode=lambda text, **_: text.split())
        self.decoder = SimpleNamespace(backend="cpu", options=DecoderOptions(), kv_bytes=1 << 20)

    def reasoning_opened(self, _prompt: Sequence[int]) -> str:
        return ""

    def chat_prompt(self, messages: Sequence[Any], **_options: Any) -> list[int]:
        if len(messages[-1]["content"]) > self.longest:
            raise ContextOverflowError("too long")
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return [1]

    def text_prompt(self, text: str) -> list[int]:
        self.asked.append(text)
        return [1]

    def generate(self, prompt: list[int], options: SamplingOptions, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        self.options.append(options)
        for word in self.texts.pop(0).split(" "):
            yield Piece(text=word, token=1)
        usage = Usage(
            prompt_tokens=7, cached_tokens=3, completion_tokens=5, ttft_s=0.25, prefill_s=0.2, decode_tokens_per_s=8.0
        )
        yield Piece(text="", finish_reason=self.finish, usage=usage)  # type: ignore[arg-type]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Type lines into a conversation; returns what was written to standard output and standard error."""

    def talk(engine: ScriptedEngine, *lines: str | type[BaseException], **options: Any) -> tuple[str, str]:
        typed = iter(lines)

        def read(_prompt: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        with closing(Attachments(engine, Output())) as attachments:  # type: ignore[arg-type]
            Repl(engine, SamplingOptions(), attachments, RunTools(None, (), Output()), read=read, **options).loop()  # type: ignore[arg-type]
        captured = capsys.readouterr()
        return captured.out, captured.err

    return talk


Talk = Callable[..., tuple[str, str]]


def test_answers_become_part_of_the_conversation(talk: Talk) -> None:
    engine = ScriptedEngine("I am well", "Good bye")
    out, _ = talk(engine, "How are you?", "", "Bye", "/bye", "never read", system="be kind")
    assert out == "Iamwell\nGoodbye\n"
    assert engine.asked == [
        [("system", "be kind"), ("user", "How are you?")],
        [("system", "be kind"), ("user", "How are you?"), ("assistant", "Iamwell"), ("user", "Bye")],
    ]
    assert engine.options[0].stop == ("\nUser:",)


def test_clear_forgets(talk: Talk) -> None:
    engine = ScriptedEngine("a", "b")
    talk(engine, "one", "/clear", "two")
    assert engine.asked == [[("user", "one")], [("user", "two")]]


def test_set_changes_what_follows(talk: Talk) -> None:
    engine = ScriptedEngine("a", "b", "c")
    _, err = talk(
        engine,
        "/set temperature 0.25",
        "/set max_tokens 9",
        "/set seed 4",
        "/set stop END OF IT",
        "/set system be brief",
        "one",
        "/set max_tokens auto",
        "/set stop",
        "/set system",
        "two",
    )
    first, second = engine.options
    assert (first.temperature, first.max_tokens, first.seed) == (0.25, 9, 4)
    assert first.stop == ("END OF IT", "\nUser:")
    assert (second.max_tokens, second.stop) == (None, ("\nUser:",))
    assert engine.asked[0][0] == ("system", "be brief")
    assert engine.asked[1][0][0] == "user"
    assert "use /set" not in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set", "use /set NAME VALUE"),
        ("/set warmth 3", "use /set NAME VALUE"),
        ("/set temperature", "use /set NAME VALUE"),
        ("/set temperature warm", "allowed: a number from 0 to 2"),
        ("/set temperature -1", "allowed: a number from 0 to 2"),
        ("/set top_k 1.5", "allowed: a whole number from 0"),
        ("/dance", "no command /dance"),
        ("/stats", "no answer yet"),
        ("x" * 60, "too long"),
    ],
)
def test_what_goes_wrong_is_told_and_the_talk_goes_on(talk: Talk, line: str, said: str) -> None:
    engine = ScriptedEngine("fine")
    out, err = talk(engine, line, "hello")
    assert said in err
    assert out == "fine\n\n"
    assert engine.options[-1].temperature == SamplingOptions().temperature
    assert engine.asked == [[("user", "hello")]]


def test_show_stats_and_help(talk: Talk) -> None:
    out, err = talk(ScriptedEngine("fine", note="no template"), "/show", "hello", "/stats", "/help")
    assert "model               scripted" in out
    assert "cpu (a test)" in out
    assert "max_tokens          auto" in out
    assert "first token after 0.25 s, 8.0 tokens/s; 7 prompt tokens (3 reused), 5 generated; context 12 of 100" in out
    assert "/clear" in out
    assert "no template" in err


def test_several_lines_between_triple_quotes(talk: Talk) -> None:
    engine = ScriptedEngine("a", "b")
    talk(engine, '"""one', "two", 'three"""', '"""all in one"""')
    assert [asked[-1][1] for asked in engine.asked] == ["one\ntwo\nthree", "all in one"]


def test_raw_lines_stand_alone(talk: Talk) -> None:
    engine = ScriptedEngine("a", "b")
    talk(engine, "one", "two", raw=True)
    assert engine.asked == ["one", "two"]
    assert engine.options[0].stop == ()


def test_ctrl_c_at_the_prompt_goes_on(talk: Talk) -> None:
    engine = ScriptedEngine("a")
    _, err = talk(engine, KeyboardInterrupt, "one")
    assert "/bye or Ctrl-D leaves" in err
    assert len(engine.asked) == 1


def test_ctrl_c_is_given_back_after_an_answer(talk: Talk) -> None:
    before = signal.getsignal(signal.SIGINT)
    talk(ScriptedEngine("a"), "one")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_cut_answer_is_told(talk: Talk) -> None:
    _, err = talk(ScriptedEngine("a", finish="length"), "one")
    assert "context of 100 tokens is full" in err
    _, err = talk(ScriptedEngine("a", finish="length"), "/set max_tokens 1", "one")
    assert "is full" not in err


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


def test_an_unreadable_memory_is_gone_without(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    with line_history(tmp_path / "lines"):
        pass


def test_a_document_is_attached(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the lamp burns oil")
    (tmp_path / "lamps").mkdir()
    (tmp_path / "lamps" / "a.txt").write_text("the lamp burns oil")
    engine = ScriptedEngine("one", "two", "three")
    engine.longest = 5000
    attach = [f"/attach {tmp_path / name}" for name in ("gone", "notes.txt", "lamps")]
    _, err = talk(engine, "/attach", *attach[:2], "Which oil?", attach[2], "What burns in the lamp?", "Which router?")
    assert "use /attach PATH" in err
    assert "gone can't be opened: No such file or directory" in err
    assert "notes.txt: 4 tokens" in err
    assert "lamps (about 4 tokens) is too long to be sent" in err
    said = [messages[-1][1] for messages in engine.asked]
    assert said[0] == "notes.txt:\n```\nthe lamp burns oil\n```\n\nWhich oil?"
    assert '<passage from="lamps/a.txt, line 1">' in said[1]
    assert "from lamps/a.txt, line 1" in err
    assert said[2].startswith("A search of the attached documents found nothing")
    assert "nothing about this was found" in err
