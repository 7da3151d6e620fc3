"""Output of commands: to a standard error that is not a terminal, and to files that the user names."""

from __future__ import annotations

import contextlib
import io
import os
import re
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


ROWS = [
    ("NAME", "BITS", "SIZE", "RESIDUALS", "DISK", "PARAMETERS", "CONTEXT", "PERPLEXITY"),
    ("demo (bundled)", "4.19", "2 MB", "1 MB", "5 MB", "2.9 M", "1024", "2.04 (+2.8 %)"),
    (
        "Qwen/Qwen3.5-35B-A3B-Instruct-4bit",
        "4.25",
        "16.1 GB",
        "17.4 GB",
        "35.0 GB",
        "35.1 B",
        "131072",
        "6.94 (+0.9 %)",
    ),
]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_table_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    Output().table(ROWS, spare=("PARAMETERS", "CONTEXT", "RESIDUALS"))
    heading, bundled, other = capsys.readouterr().out.splitlines()
    assert max(map(len, (heading, bundled, other))) <= columns
    assert "PERPLEXITY" in heading
    assert ("PARAMETERS" in heading) is (columns >= 100)
    assert ("…" in other) is (columns < 200), "shortened in the middle"
    assert other.startswith("Qwen/")
    assert other.split()[0].endswith("bit")


def test_a_piped_table_is_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    Output().table(ROWS, spare=("PARAMETERS",))
    heading, *_, other = capsys.readouterr().out.splitlines()
    assert "PARAMETERS" in heading
    assert other.startswith(ROWS[-1][0])


@pytest.mark.parametrize("known", [True, False])
def test_the_window_is_marked_while_bars_are_drawn(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    for name in ("TMUX", "STY", "NO_COLOR", "WT_SESSION", "KONSOLE_VERSION", "ConEmuPID", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if known:
        monkeypatch.setenv("WT_SESSION", "{1}")
    with contextlib.suppress(KeyboardInterrupt), Output().progress() as report:
        for done in (0, 5):
            report(Progress(phase="quantize", done=done, total=10.0, unit="blocks", message="Block"))
        raise KeyboardInterrupt
    marks = ["\x1b]9;4;1;0\x07", "\x1b]9;4;1;50\x07", "\x1b]9;4;0;0\x07"] if known else []
    assert re.findall(r"\x1b\]9;.*?\x07", stream.getvalue()) == marks


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
