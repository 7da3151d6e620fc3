"""Output of commands: to a standard error that is not a terminal, and to files that the user names."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from app.cli import output
from app.cli.output import LINE_S, Output, write_output
from models.errors import StoreError
from models.progress import Progress


def test_progress_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with Output().progress() as report:
        for done in range(11):
            report(Progress(phase="quantize", done=done, total=10.0, unit="blocks", message=f"Block {done + 1} of 10"))
            now += LINE_S / 2
        report(Progress(phase="verify", done=0, total=1.0, unit="bytes", message="Verifying"))
    said = capsys.readouterr()
    assert not said.out
    lines = [line.removeprefix("lowbit-chat: ") for line in said.err.splitlines()]
    assert lines[0] == "Block 1 of 10"
    assert lines[1] == "Block 3 of 10: 2/10 blocks, about 12 s left"
    assert lines[2] == "Block 5 of 10: 4/10 blocks, about 9 s left"
    assert lines[-2:] == ["Block 9 of 10: 8/10 blocks, nearly done", "Verifying"], "nearly done is said once"
    assert len(lines) == 6, lines


def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path: Path) -> None:
    kept, link, ahead = tmp_path / "kept.md", tmp_path / "link.md", tmp_path / "ahead.md"
    kept.write_bytes(b"a longer text before")
    kept.chmod(0o600)
    link.symlink_to("kept.md")
    ahead.symlink_to("made.md")
    for path in (link, ahead):
        write_output(path, b"new")
        assert path.is_symlink()
        assert path.read_bytes() == b"new"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ahead.md", "kept.md", "link.md", "made.md"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")
def test_what_is_no_file_is_written_into(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"new")
    reader.join()
    assert read == [b"new"]
    write_output(Path(os.devnull), b"new")
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()
    with (tmp_path / "log").open("w+b") as log:
        log.write(b"before, ")
        log.flush()
        write_output(Path(f"/dev/fd/{log.fileno()}"), b"new")
        assert Path(log.name).read_bytes() == b"before, new"


@pytest.mark.parametrize(
    ("made", "said"),
    [("/dev/full", "the disk is full"), ("folder", "directory"), ("loop", "symbolic links"), ("no/file", "No such")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="it has /dev/full, and these words")
def test_what_cannot_be_written_is_told(tmp_path: Path, made: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=f"cannot write .*{said}"):
        write_output(tmp_path / made, b"new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "loop"]
