"""Templates that would not terminate, or would fill memory, are stopped; those of real models are unaffected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.errors import RequestError
from runtime.text.template_process import TemplateProcess, template_process
from runtime.text.tokenizer import Tokenizer
from tests.runtime.text.test_tokenizer import TEMPLATE, byte_level, save

MESSAGES = [{"role": "user", "content": "hi"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
_GROW = "{% set ns = namespace(x=SEED) %}{% for i in range(200) %}{% set ns.x = STEP %}{% endfor %}"


def growing(seed: str, step: str) -> str:
    return _GROW.replace("SEED", seed).replace("STEP", step)


HOSTILE = {
    "loops in loops": NESTED,
    "a loop that calls itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a filter's loop": "{{ (range(99999) | list * 90000) | map('string') | join | length }}",
    "multiplied text": "{{ 'a' * 10**10 }}",
    "text that doubles": growing("'a'", "ns.x ~ ns.x"),
    "lists that double": growing("[1]", "ns.x + ns.x"),
    "numbers that double": growing("9", "ns.x * ns.x"),
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "a huge width": "{{ 'a' | center(10**10) }}",
    "a huge format": "{{ '%010000000000d' % 1 }}{{ '{:>10000000000}'.format(1) }}",
    "a tree of lists": growing("[1]", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "a comparison of trees": growing("[1]", "[ns.x, ns.x]").replace("ns", "a")
    + growing("[1]", "[ns.x, ns.x]")
    + "{{ a.x == ns.x }}",
    "200 parentheses": "{{ " + "(" * 200 + "1" + ")" * 200 + " }}",
    "100,000 parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "a long text": "{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "a long refusal": "{{ raise_exception('a' * 10**7) }}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=1.0)
    yield process
    process.close()


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.timeout(60)
def test_a_hostile_template_is_one_clear_error(process: TemplateProcess, kind: str) -> None:
    with pytest.raises(RequestError, match="chat template") as raised:
        process.render(HOSTILE[kind], MESSAGES, tokens={})
    assert len(str(raised.value)) < 500
    assert process.render("{{ messages[0].content }}", MESSAGES, tokens={}) == "hi"


@pytest.mark.timeout(60)
def test_a_tokenizer_has_its_template_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TemplateProcess(seconds=0.2)
    monkeypatch.setattr("runtime.text.tokenizer.template_process", lambda: own)
    tokenizer = save(byte_level(), tmp_path, chat_template=NESTED)
    with pytest.raises(RequestError, match=r"was stopped: it took more than 0\.2 s"):
        tokenizer.chat(MESSAGES)
    own.close()


def test_a_process_that_was_killed_is_started_again(process: TemplateProcess) -> None:
    process.render("", MESSAGES, tokens={})
    child = process._child._child
    assert child is not None
    child.kill()
    child.wait()
    assert process.render("x", MESSAGES, tokens={}) == "x"


def test_an_interrupted_request_does_not_answer_the_next(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.render("", MESSAGES, tokens={})
    child = process._child._child
    assert child is not None
    assert child.stdout is not None
    with monkeypatch.context() as patched:
        patched.setattr(process._child, "_running", lambda: SimpleNamespace(stdin=child.stdin, stdout=Interrupted()))
        with pytest.raises(KeyboardInterrupt):
            process.render("mine", MESSAGES, tokens={})
    assert process.render("yours", MESSAGES, tokens={}) == "yours"


class Interrupted:
    """A pipe that is not read, because of Ctrl-C."""

    def readline(self) -> bytes:
        raise KeyboardInterrupt


def test_messages_nested_beyond_measure_are_refused(process: TemplateProcess) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="too deeply"):
        process.render("x", [{"role": "user", "content": deep}], tokens={})


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    process = TemplateProcess()
    process.start()
    with pytest.raises(RequestError, match="no process could be started"):
        process.render("x", MESSAGES, tokens={})


def test_the_process_takes_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    process = TemplateProcess()
    assert process.render("x", MESSAGES, tokens={}) == "x"
    process.close()


def test_a_template_is_applied_quickly(tmp_path: Path) -> None:
    """The median of many, so that a busy machine does not count; the limit is a hundred times what it takes."""
    tokenizer: Tokenizer = save(byte_level(), tmp_path, chat_template=TEMPLATE)
    tokenizer.chat(MESSAGES)
    taken = []
    for _ in range(51):
        began = time.perf_counter()
        tokenizer.chat(MESSAGES)
        taken.append(time.perf_counter() - began)
    assert sorted(taken)[25] < 0.05
    assert template_process().knows_tools("{{ tools }}")
