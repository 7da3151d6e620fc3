from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.conversation import Message
from app.history import store
from app.paths import history_file
from app.settings import RULES
from models.errors import CheckpointError
from models.exact import ExactSource
from models.store import StoredModel
from runtime.text.constraint import Grammar
from tests.app.cli.conftest import write_checkpoint

FIELDS = {
    "text", "finish_reason", "prompt_tokens", "completion_tokens", "ttft_s", "decode_tokens_per_s", "model", "backend",
    "bits", "kv", "k_chunk", "speculation", "passages", "tool_calls",
}  # fmt: skip
Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]


@contextlib.contextmanager
def opened(file: Path) -> Iterator[store.History]:
    with contextlib.closing(store.History(file)) as history:
        yield history


def test_the_json_object_has_exactly_the_documented_fields(answer: Answer) -> None:
    found = answer("run", "demo", "hello", "--max-tokens", 5, "--seed", 1, "--k-chunk", 0)
    assert found.keys() == FIELDS
    assert found["model"] == "demo"
    assert found["backend"] == "cpu"
    assert (found["bits"], found["kv"], found["speculation"]) == (4, "int4", None)
    assert found["k_chunk"] == {"qkv": 0, "o": 0, "gate_up": 0, "down": 0, "head": 0}
    assert (found["completion_tokens"], found["finish_reason"]) == (5, "length")
    assert found["ttft_s"] > 0
    found = answer("run", "demo", "hi", "--max-tokens", 2, "--kv", "int8", "--k-chunk", 24, "--backend", "reference")
    assert (found["kv"], found["backend"]) == ("int8", "reference")
    assert set(found["k_chunk"].values()) == {24}


def test_exact_answers_need_the_source(
    answer: Answer,
    error: Error,
    run: Run,
    stored: str,
    checkpoint: Path,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = ("hi", "--max-tokens", 20, "--budget", "exact", "--temperature", 0, "--speculate", "--gamma", 2)
    assert "is not where it was" in error("run", stored, "hi", "--budget", "exact")
    with monkeypatch.context() as settings:
        settings.setenv("LOWBIT_CHAT_BUDGET", "exact")
        settings.setattr("runtime.compensation.DEFAULT_BUDGET_PERCENT", 0.0)
        usual = run("run", stored, "hi", "--max-tokens", 2, "--json")
        assert json.loads(usual.stdout)["kv"] == "int4"
        told = [line for line in usual.stderr.splitlines() if "does not answer exactly" in line]
        assert ["is not where it was" in line for line in told] == [True]
    found = answer("run", checkpoint, *how)
    assert (found["kv"], found["speculation"]["source"], found["speculation"]["gamma"]) == ("fp16", "model", 2)
    assert not any(found["k_chunk"].values())
    assert answer("run", stored, *how)["text"] == found["text"], "its checkpoint was named once"
    answer("quantize", checkpoint, "--bits", 3, "--name", "mine")
    assert answer("run", "mine", *how)["text"] == found["text"]
    assert "leave out" in run("run", checkpoint, "hi", "--budget", "exact", "--k-chunk", 5, code=2).stderr
    assert "CPU backend only" in error("run", checkpoint, "hi", "--budget", "exact", "--backend", "reference")
    model, other = StoredModel.open_folder(packed), write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="norms, biases or embeddings"):
        ExactSource(other, model)


def test_a_base_model_says_so(run: Run) -> None:
    """It has no template; with `--raw`, nobody expects an answer."""
    for more in ((), ("--raw",)):
        said = run("run", "demo", "hi", "--max-tokens", 1, *more).stderr
        assert ("demo is a base model" in said) is not bool(more)


def test_a_schema_constrains_the_answer(run: Run, error: Error, services: Any, tmp_path: Path) -> None:
    """Which forms there are is the engine's matter, and the tiny model's tokenizer allows none."""
    schema, broken, list_of = tmp_path / "schema.json", tmp_path / "broken.json", tmp_path / "list.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}))
    asked = list[Any]()

    def load(plan: Any, **how: Any) -> Any:
        loaded = type(services).load(services, plan, **how)
        submit = loaded.engine.submit

        def spy(prompt: Any, options: Any, *how: Any, **more: Any) -> Any:
            asked.append(options.grammar)
            return submit(prompt, replace(options, grammar=None), *how, **more)

        loaded.engine.submit = spy
        return loaded

    services.load = load
    for how in ((), ("--raw",)):
        run("run", "demo", "A number.", "--max-tokens", 1, "--schema", schema, *how)
    assert asked == [Grammar.of_schema(json.loads(schema.read_text()))] * 2
    broken.write_text("{")
    list_of.write_text("[]")
    assert "broken.json" in error("run", "demo", "hi", "--schema", broken)
    assert "no schema" in error("run", "demo", "hi", "--schema", list_of)


def test_output_as_lines_of_json(run: Run) -> None:
    lines = run("run", "demo", "hello", "--seed", 1, "--max-tokens", 8, "--output", "jsonl").stdout.splitlines()
    *pieces, whole = map(json.loads, lines)
    assert whole.keys() == FIELDS
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert len(pieces) > 1
    alone = run("run", "demo", "hello", "--seed", 1, "--max-tokens", 8, "--output", "json").stdout
    assert json.loads(alone)["text"] == whole["text"]


def test_the_last_chat_goes_on_and_is_saved(run: Run, answer: Answer) -> None:
    """Not a pinned one, which the list has first; a first one is made."""
    how = ("--seed", 1, "--max-tokens", 6)
    first = answer("run", "demo", "-c", "I am Tom.", *how)
    with opened(history_file()) as history:
        (chat,) = history.chats()
        history.record(
            "pinned",
            None,
            [Message(id="m", parent=None, role="user", text="x")],
            updated=datetime(2020, 1, 1, tzinfo=UTC),
        )
        history.pin("pinned", pinned=True)
    second = answer("run", "demo", "--continue", "Who am I?", *how)
    assert second["prompt_tokens"] > first["prompt_tokens"]
    with opened(history_file()) as history:
        said = [message.text for message in history.messages(chat.id)]
    assert said == ["I am Tom.", first["text"], "Who am I?", second["text"]]
    assert "leave out --continue" in run("run", "demo", "hi", "-c", "--raw", code=2).stderr


def test_a_preset_is_the_system_prompt(answer: Answer, run: Run, error: Error) -> None:
    how = ("--seed", 1, "--max-tokens", 1)
    plain, preset = (
        answer("run", "demo", "hi", *how, *more)["prompt_tokens"] for more in ((), ("--template", "Brief"))
    )
    assert preset > plain
    assert "choose one of Brief, Coder" in error("run", "demo", "hi", "--template", "Nope")
    assert "leave out --system" in run("run", "demo", "hi", "--template", "Brief", "--system", "x", code=2).stderr


def test_the_text_is_what_is_printed(run: Run, answer: Answer) -> None:
    arguments = ("run", "demo", "hello", "--raw", "--max-tokens", 20, "--temperature", 0)
    found = answer(*arguments)
    result = run(*arguments)
    assert result.stdout == found["text"].rstrip("\n") + "\n"
    assert result.stderr == ""


def test_a_seed_gives_the_same_answer(answer: Answer) -> None:
    arguments = ("run", "demo", "hello", "--raw", "--max-tokens", 30, "--temperature", 2)
    texts = [answer(*arguments, "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "piped", "joined"),
    [
        (["abc"], "", "abc"),
        ([], "abc\n", "abc"),
        (["abc"], "defg\n\n", "abc\n\ndefg"),
        (["abc"], " \n", "abc"),
    ],
    ids=["argument", "stdin", "both", "blank-stdin"],
)
def test_prompt_and_standard_input_are_joined(answer: Answer, arguments: list[str], piped: str, joined: str) -> None:
    found = answer("run", "demo", *arguments, "--raw", "--max-tokens", 1, piped=piped)
    assert found["prompt_tokens"] == len(joined)  # the tokenizer has a token for every character


@pytest.mark.parametrize(
    "piped",
    [
        b"abc\0def",
        "abc".encode("utf-16"),
        b"\x89PNG\r\n\x1a\n\0\0",
        "caf\u00e9".encode("latin-1"),
        b"\xff\xd8\xff\xe0JFIF",
    ],
    ids=["nul", "utf-16", "png", "latin-1", "jpeg"],
)
def test_what_is_not_text_is_no_prompt(error: Error, piped: bytes) -> None:
    assert "standard input is not UTF-8 text (byte " in error("run", "demo", "what is it?", piped=piped)


def test_a_system_prompt_is_part_of_the_prompt_and_a_mark_of_utf_8_is_not(answer: Answer) -> None:
    found = answer("run", "demo", "--raw", "--max-tokens", 1, piped="\ufeffabc\r\nd")
    assert found["prompt_tokens"] == len("abc\nd")
    plain = answer("run", "demo", "hi", "--max-tokens", 1)
    told = answer("run", "demo", "hi", "--max-tokens", 1, "--system", "be kind")
    assert told["prompt_tokens"] > plain["prompt_tokens"]


@pytest.mark.parametrize("option", ["temperature", "top-p", "top-k", "min-p", "max-tokens", "context"])
def test_an_option_takes_what_its_error_names(run: Run, option: str) -> None:
    arguments = ("run", "demo", "hi", "--max-tokens", 1, f"--{option}")
    if "auto" in run(*arguments, -5, code=2).stderr:
        run(*arguments, "auto")


def test_a_stop_text_ends_the_answer(answer: Answer) -> None:
    arguments = ("run", "demo", "hello", "--raw", "--max-tokens", 30, "--temperature", 0)
    text = answer(*arguments)["text"]
    stop = text[5:7]
    found = answer(*arguments, "--stop", "never said", "--stop", stop)
    assert found["text"] == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"


def test_environment_beats_the_file_and_a_flag_beats_both(
    answer: Answer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("config", "set", "max_tokens", "4")
    arguments = ("run", "demo", "hello", "--raw", "--temperature", 0)
    assert answer(*arguments)["completion_tokens"] == 4
    monkeypatch.setenv("LOWBIT_CHAT_MAX_TOKENS", "3")
    assert answer(*arguments)["completion_tokens"] == 3
    assert answer(*arguments, "--max-tokens", 2)["completion_tokens"] == 2


def test_an_answer_cut_by_the_context_says_so(run: Run) -> None:
    result = run("run", "demo", "hello", "--raw", "--context", 6, "--temperature", 0)
    assert "context of 6 tokens is full" in result.stderr
    assert run("run", "demo", "hello", "--raw", "--max-tokens", 1).stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "demo"],
        ["run", "demo", "  "],
        ["run", "demo", "hi", "--raw", "--system", "x"],
        ["run", "demo", "hi", "--kv", "int5"],
        ["run", "demo", "hi", "--backend", "vulkan"],
        ["run", "demo", "hi", "--k-chunk", "1025"],
        ["run", "demo", "hi", "--temperature", "-1"],
        ["run", "demo", "hi", "--max-tokens", "0"],
        ["run", "demo", "hi", "--budget", "101"],
        ["run", "demo", "hi", "--budget", "-1"],
        ["run", "demo", "hi", "--budget", "nan"],
        ["run", "demo", "hi", "--budget", "5", "--k-chunk", "4"],
        ["serve", "--budget", "5", "--k-chunk", "4"],
        ["bench", "demo", "--budget", "101"],
        ["run", "demo", "hi", "there"],
        ["dance"],
        ["eval", "demo"],
        ["quantize", "demo", "--bits", "5"],
        ["quantize", "demo", "--bits", "2.9"],
        ["quantize", "demo", "--bits", "nan"],
        ["quantize", "demo", "--bits", "three"],
        ["quantize", "demo", "--method", "best"],
        ["quantize", "demo", "--group-size", "33"],
        ["quantize", "demo", "--residual-bits", "5"],
        ["quantize", "demo", "--name", "demo"],
        ["eval", "demo", "--text", "x", "--window", "4", "--stride", "5"],
        ["eval", "demo", "--text", "x", "--full-precision", "--k-chunk", "4"],
        ["eval", "demo", "--text", "x", "--full-precision", "--budget", "4"],
        ["eval", "demo", "--text", "x", "--full-precision", "--select", "approx"],
        ["eval", "demo", "--text", "x", "--select", "best"],
        ["eval", "demo", "--text", "x", "--window", "1"],
        ["eval", "demo", "--text", "x", "--stride", "0"],
        ["eval", "demo", "--text", "x", "--max-tokens", "1"],
        ["eval", "demo", "--text", "x", "--k-chunk", "4", "--budget", "4"],
        ["bench", "demo", "--decode-tokens", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments, piped="", code=2)
    assert result.stdout == ""
    assert "Usage: " in result.stderr


def test_experts_on_the_device_are_an_error_where_a_model_has_none(
    error: Error, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a flag; the setting is for any model."""
    assert "the model has no experts" in error("bench", "demo", "--experts-on-device", 2)
    wrong = run("bench", "demo", "--experts-on-device", "all", code=2).stderr
    assert "it must be a whole number from 0 to 10000, or auto" in " ".join(wrong.split())
    monkeypatch.setenv("LOWBIT_CHAT_EXPERTS_ON_DEVICE", "2")
    assert run("run", "demo", "hi", "--max-tokens", 1).exit_code == 0


def test_what_does_not_fit_is_an_error(error: Error, services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "300 tokens" in error("run", "demo", "x" * 300, "--raw")
    assert "256" in error("run", "demo", "hi", "--context", 1000)
    services.available = 100 << 20
    assert "105 MB is free now" in error("run", "demo", "hi")
    monkeypatch.setenv("LOWBIT_CHAT_TEMPERATURE", "warm")
    assert "LOWBIT_CHAT_TEMPERATURE" in error("run", "demo", "hi")


def test_a_bug_keeps_its_traceback(run: Run, services: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(services, "load", broken)
    with pytest.raises(ZeroDivisionError):
        run("run", "demo", "hi")


def test_speculation_is_reported(answer: Answer) -> None:
    common = ("run", "demo", "hi", "--max-tokens", 20, "--temperature", 0, "--k-chunk", 64)
    plain = answer(*common, "--kv", "hierarchical", "--no-speculate")
    found = answer(*common, "--speculate", "--gamma", 2)
    assert (found["kv"], plain["speculation"]) == ("hierarchical", None)
    assert found["text"] == plain["text"]
    did = found["speculation"]
    assert did.keys() == {"gamma", "acceptance_rate", "tokens_per_verify", "source"}
    assert did["source"] == "model"
    assert did["gamma"] == 2
    assert 0 <= did["acceptance_rate"] <= 1
    assert did["tokens_per_verify"] == pytest.approx(1 + 2 * did["acceptance_rate"], abs=0.3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--speculate", "--kv", "fp16", "--gamma", "3"), "need the hierarchical cache"),
        (("--gamma", "3"), "only applies with --speculate"),
        (("--no-speculate", "--gamma", "3"), "only applies with --speculate"),
        (("--speculate", "--gamma", "16"), "16"),
    ],
)
def test_speculation_that_cannot_be_is_wrong_usage(run: Run, wrong: tuple[str, ...], words: str) -> None:
    assert words in run("run", "demo", "hi", *wrong, code=2).stderr


def test_settings_may_speculate(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CHAT_SPECULATE", "on")
    monkeypatch.setenv("LOWBIT_CHAT_GAMMA", "2")
    found = answer("run", "demo", "hi", "--max-tokens", 5, "--temperature", 0, "--k-chunk", 64)
    assert found["speculation"]["gamma"] == 2
    assert answer("run", "demo", "hi", "--max-tokens", 5, "--k-chunk", 0, "--no-speculate")["speculation"] is None


@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", 2.5), ("--top-p", 0), ("--min-p", 1.5), ("--max-tokens", 0)]
)
def test_ranges_are_those_of_the_settings(run: Run, option: str, value: float) -> None:
    rule = RULES[option.removeprefix("--").replace("-", "_")]
    said = run("run", "demo", "hi", option, value, code=2).stderr
    assert " ".join(rule.allowed.split()[:5]) in " ".join(said.replace("│", " ").split())


def test_documents_are_sent_or_searched(run: Run, answer: Answer, tmp_path: Path) -> None:
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("a lamp")
    long.write_text("Nothing here.\n\n" * 200 + "The lamp burns whale oil.\n")
    arguments = ("run", "demo", "What burns in the lamp?", "--max-tokens", 1, "--system", "")
    plain = answer(*arguments)
    assert plain["passages"] is None
    found = answer(*arguments, "--attach", short)
    assert found["passages"] is None
    assert found["prompt_tokens"] > plain["prompt_tokens"]
    (passage,) = answer(*arguments, "--attach", long)["passages"]
    assert (passage["file"], passage["unit"]) == ("long.txt", "line")
    told = run(*arguments, "--attach", long).stderr
    assert "long.txt (about 756 tokens) is too long to be sent: it is searched for each question" in told
    assert "from long.txt, line" in told
    assert answer("run", "demo", "router?", "--max-tokens", 1, "--attach", long)["passages"] == []
    assert "does not exist" in run("run", "demo", "x", "--attach", tmp_path / "gone", code=2).stderr
    assert "leave out --attach" in run("run", "demo", "x", "--raw", "--attach", short, code=2).stderr
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0")
    said = run("run", "demo", "x", "--attach", tmp_path / "picture.txt", code=1).stderr
    assert said.endswith("picture.txt is a binary file\n")


def test_a_conversation_changes_its_model_and_budget(
    run: Run, services: Any, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = ("/budget 1000", "/budget exact", "/budget off")
    lines = iter(["hello", f"/model {stored}", "again", "/model nope", *budgets, "/show", "/model"])
    monkeypatch.setattr("app.cli.repl.Repl._typed_line", lambda _repl, _prompt: next(lines, "/bye"))
    monkeypatch.setattr("app.cli.run._on_terminal", lambda: True)
    loads: list[Any] = []

    def load(plan: Any, **how: Any) -> Any:
        loads.append((plan.model.name, plan.asked.compensation.budget_percent))
        assert len(closed) == len(loaded), "two models at once may not fit"
        loaded.append(type(services).load(services, plan, **how))
        close = loaded[-1].engine.close
        monkeypatch.setattr(loaded[-1].engine, "close", lambda: (closed.append(1), close()))
        return loaded[-1]

    loaded: list[Any] = []
    closed: list[int] = []
    services.load = load
    result = run("run", "demo", "--max-tokens", 3)
    assert loads == [("demo", 0), (stored, 0), (stored, 0), (stored, 0)], "again where it can't be exact"
    assert "there is no stored model 'nope'" in result.stderr
    assert "budget can't be '1000'; it must be a number from 0 to 100" in result.stderr
    assert "is not where it was" in result.stderr, "its checkpoint"
    assert f"{stored} answers from here on" in result.stderr
    assert f"* {stored}" in result.stdout
    assert f"model               {stored}" in result.stdout


def test_a_new_chat_saves_the_one_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "/new", "two"])
    monkeypatch.setattr("app.cli.repl.Repl._typed_line", lambda _repl, _prompt: next(lines, "/bye"))
    monkeypatch.setattr("app.cli.run._on_terminal", lambda: True)
    run("run", "demo", "-c", "--max-tokens", 3)
    with opened(history_file()) as history:
        assert sorted(chat.title for chat in history.chats()) == ["one", "two"]
