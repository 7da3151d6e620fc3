"""Every reader with some hundred altered inputs; `make fuzz` tries many more, in processes with limits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.mutation import altered_json, damaged
from tests.fuzz.reader import READERS, Opener, Reader, attempt, fuzz, opener
from tests.fuzz.watch import Limits, watch

COUNT = 200
"""Inputs of each reader."""
SEED = 23


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_refuses(name: str, tmp_path: Path) -> None:
    with opener(name)(tmp_path) as reader:
        for content in reader.sound:
            reader.read(content)
        fuzz(reader, start=SEED, count=COUNT)


# Readers with defects, which only objects bring out


def planted(defect: Callable[[], object]) -> Opener:
    @contextmanager
    def opened(folder: Path) -> Iterator[Reader]:
        def read(content: bytes) -> None:
            if b"{" in content:
                defect()
            if content != b"[]":
                raise ValueError("refused")

        assert not list(folder.iterdir())
        yield Reader(
            sound=(b"[]",), inputs=altered_json([1, {"a": 2}]) | damaged(b"[]"), read=read, errors=(ValueError,)
        )

    return opened


def _raise() -> None:
    raise KeyError("planted")


def _grow() -> None:
    held = b"x" * (128 << 20)
    time.sleep(60)
    assert held


def _panic() -> None:
    from tokenizers import Tokenizer, models, normalizers

    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.normalizer = normalizers.Precompiled(b"\x04\0\0\0\xff\xff\xff\x7f")
    tokenizer.encode("a")


def _print() -> None:
    os.write(1, b"\x1b]0;title\x07")
    os._exit(0)


PLANTED = (_raise, lambda: time.sleep(60), _grow, os.abort, _panic, _print)
raises, hangs, grows, dies, panics, prints = map(planted, PLANTED)


@pytest.mark.parametrize(
    ("name", "limits", "said"),
    [
        ("raises", Limits(), "KeyError: 'planted'"),
        ("hangs", Limits(seconds=0.5), "more than 0.5 s"),
        ("grows", Limits(bytes=64 << 20), "more than 64 MiB of memory"),
        ("dies", Limits(), f"the process ended with status -{signal.SIGABRT.value}"),
        ("prints", Limits(), "it printed '\\x1b', which a terminal obeys"),
    ],
)
def test_a_defect_is_reported_with_its_input(
    name: str, limits: Limits, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # hypothesis adds a hint to an error there
    found = watch(f"tests.fuzz.test_fuzz:{name}", start=SEED, seconds=30, keep=tmp_path / "kept", limits=limits)
    assert found.defect == said
    assert "test_fuzz.py" in found.said or name in ("grows", "prints")
    assert found.input is not None
    assert b"{" in found.input.read_bytes()


def test_a_panic_is_one_too(tmp_path: Path) -> None:
    with panics(tmp_path) as reader, pytest.raises(AssertionError, match="PanicException: index out of bounds"):
        attempt(reader, b"{")


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    def inputs(start: int) -> list[bytes]:
        given: list[bytes] = []
        with planted(lambda: None)(tmp_path) as reader:
            fuzz(Reader(sound=(), inputs=reader.inputs, read=given.append, errors=()), start=start, count=30)
        return given

    assert inputs(1) == inputs(1) != inputs(2)


def test_the_command_tells_of_defects_and_repeats_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"/v1/models 200 7\n[]")
    assert main(["stream", "--input", str(file)]) == 0
    assert capsys.readouterr().out.startswith("stream: 1 inputs")
    file.write_bytes(b"nowhere")  # no address that the reader knows: a defect of the input itself
    assert main(["stream", "--input", str(file), "--keep", str(tmp_path), "--seed", "7"]) == 1
    told = capsys.readouterr().out
    assert "ValueError: not enough values" in told
    assert f"again: python -m tests.fuzz stream --input {tmp_path / 'stream-7'}" in told
