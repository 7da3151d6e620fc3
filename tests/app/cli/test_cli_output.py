"""Output of commands when standard error is not a terminal."""

from __future__ import annotations

import pytest

from app.cli import output
from app.cli.output import LINE_S, Output
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
