"""Untrusted files: whatever they contain, reading ends, with an OSError or a ValueError at worst."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tokenizers import Tokenizer, models, normalizers

from models.foreign import check_folder, open_file, panics_raised, parse_json, read_file, read_json


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pipe, "it is not a regular file"),
        (lambda path: link(path, "/dev/zero"), "it is not a regular file"),
        (lambda path: link(path, "/dev/tty"), "it is not a regular file"),
        (lambda path: link(path, path.name), "symbolic links"),
        (lambda path: link(path, "nowhere"), "No such file"),
        (lambda path: path.parent, "Is a directory"),
        (sparse, "it has more than 32 MiB"),
    ],
    ids=["pipe", "endless", "terminal", "link to itself", "link to nothing", "folder", "huge"],
)
def test_what_cannot_be_read(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=said):
        read_json(make(tmp_path / "x"))


def test_files_are_read_whole_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf[1]")
    there = link(tmp_path / "link", "file")
    assert read_json(there) == [1]
    assert read_file(there, most=6) == b"\xef\xbb\xbf[1]"
    with pytest.raises(OSError, match="it has more than 0 MiB"):
        read_file(there, most=5)
    with open_file(there) as file:
        assert file.read(3) == b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('["\\ud800"]', "surrogates not allowed"),
        ("9" * 5000, "digits"),
        (b"\xff\xfe[\x00]\x00", "utf-8"),
        ("", "Expecting value"),
    ],
    ids=["lists", "tables", "surrogate", "number", "UTF-16", "nothing"],
)
def test_what_is_no_json_here(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_keys_may_be_there_twice_unless_not() -> None:
    assert parse_json('{"a": 1, "a": "\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(ValueError, match="a duplicate key"):
        parse_json('{"a": {"b": 1, "b": 2}}', unique=True)


def test_a_panic_is_a_value_error() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.normalizer = normalizers.Precompiled(b"\x04\0\0\0\xff\xff\xff\x7f")
    with pytest.raises(ValueError, match="the library that reads it crashed: index out of bounds"), panics_raised():
        tokenizer.encode("a")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, KeyError])
def test_other_errors_pass(kind: type[BaseException]) -> None:
    def fail() -> NoReturn:
        raise kind("x")

    with pytest.raises(kind), panics_raised():
        fail()


def test_a_folder_of_files_alone(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "file").touch()
    link(tmp_path / "to file", "file")
    link(tmp_path / "to nothing", "nowhere")
    check_folder(tmp_path)
    pipe(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is not a regular file: '.*pipe'"):
        check_folder(tmp_path)
