"""What commands write where standard error is no terminal."""

from __future__ import annotations

import pytest

from app.cli import output
from app.cli.output import LINE_S, Output, duration
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
    assert lines[1] == "Block 3 of 10: 20%, about 12 s left"
    assert lines[2] == "Block 5 of 10: 40%, about 9 s left"
    assert lines[-2:] == ["Block 9 of 10: 80%, about 3 s left", "Verifying"]
    assert len(lines) == 6


@pytest.mark.parametrize(("seconds", "said"), [(3.4, "3 s"), (89, "89 s"), (100, "2 min"), (4500, "1 h 15 min")])
def test_durations_are_said_plainly(seconds: float, said: str) -> None:
    assert duration(seconds) == said
