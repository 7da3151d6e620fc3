"""The program without arguments: starts the terminal UI, without the command line's imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli import start
from app.settings import SettingsError


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "at_a_terminal", lambda: True)
    monkeypatch.setattr(sys, "argv", ["lowbit-chat"])
    monkeypatch.setattr(sys, "stderr", sys.stderr)


@pytest.mark.usefixtures("terminal")
def test_it_is_the_ui_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tui.run", lambda: 3)
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 3


@pytest.mark.usefixtures("terminal")
def test_what_a_file_caused_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise SettingsError("settings.toml: theme is\n'pink'")

    monkeypatch.setattr("app.tui.run", fail)
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "lowbit-chat: settings.toml: theme is 'pink'\n"


@pytest.mark.usefixtures("terminal")
def test_a_word_is_for_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lowbit-chat", "--version"])
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("lowbit-chat ")


def test_the_ui_does_not_import_the_command_line() -> None:
    code = (
        "import sys\nfrom app.cli import start\nimport app.tui\n"
        "start.at_a_terminal, app.tui.run, sys.argv = lambda: True, lambda: 0, ['lowbit-chat']\n"
        "try:\n    start.main()\nfinally:\n    print('typer' in sys.modules, 'app.cli.main' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
