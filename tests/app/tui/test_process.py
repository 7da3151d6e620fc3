"""The UI's process: light, with a quick first frame, and gone without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.app.pseudo_terminal import ROOT, PseudoTerminal

SCRIPT = """
import asyncio, importlib.util, sys
sys.path.insert(0, {repository!r})
spec = importlib.util.spec_from_file_location("scripted", {conftest!r})
scripted = importlib.util.module_from_spec(spec)
sys.modules["scripted"] = scripted
spec.loader.exec_module(scripted)
"""
CHAT = """
async def main():
    runtime = scripted.Runtime(answers=["# Hello\\n\\n```python\\nx = 1\\n```"], shelf=False)
    app = scripted.make_app(runtime)
    async with app.run_test() as pilot:
        stage = scripted.Stage(app, pilot, runtime)
        await stage.ready()
        await stage.ask("hi")
        await stage.answered()
        for key in ("f2", "q", "escape", "escape", "f3", "right", "enter", "f4", "r", "escape"):
            await pilot.press(key)
            await pilot.pause(0.1)
asyncio.run(main())
heavy = {"torch", "transformers", "numba", "numpy", "triton", "llvmlite", "huggingface_hub", "tokenizers"}
heavy |= {"matplotlib", "plotext", "pydantic"}
print(sorted(heavy & set(sys.modules)))
"""


def script(body: str) -> str:
    conftest = str(Path(__file__).parent / "conftest.py")
    return SCRIPT.format(repository=str(ROOT), conftest=conftest) + body


@contextmanager
def in_terminal(body: str) -> Iterator[PseudoTerminal]:
    """Run a script in a terminal, until it shows a loaded model."""
    terminal = PseudoTerminal(sys.executable, "-c", script(body))
    try:
        terminal.until("Ask anything.", "demo", "cpu")
        yield terminal
    finally:
        terminal.close()


MARKING = """
import pathlib
class Marking(scripted.Supervisor):
    async def close(self):
        await super().close()
        pathlib.Path({mark!r}).write_text("yes")
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_nothing_heavy_is_ever_imported() -> None:
    done = run(CHAT)
    assert done.stdout.strip() == "[]", done.stderr


def test_what_stays_is_left_out_of_garbage_collection() -> None:
    done = run(
        "import gc\ngc.disable()  # as the entry does\nfrom app.tui.preload import preload\npreload(freeze=True)\n"
        "print(gc.get_freeze_count() > 10_000, gc.isenabled())"
    )
    assert done.stdout.strip() == "True True", done.stderr


@pytest.mark.parametrize(
    ("module", "later"),
    [
        ("app.tui", {"textual", "httpx", "torch", "app.settings"}),
        (
            "app.tui.app",
            {"app.client", "app.tui.screens.dialogs", "app.tui.widgets.plain_table", "models.spec", "tomllib"},
        ),
    ],
)
def test_importing_the_entry_imports_almost_nothing(module: str, later: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({later} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_runtime_is_started_after_the_first_frame() -> None:
    body = """
frames = []
class Late(scripted.Supervisor):
    async def ensure(self):
        frames.append("Ask anything." in text_of(app))
        return await super().ensure()
def text_of(app):
    return "\\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())
runtime = scripted.Runtime()
app = scripted.ChatApp(scripted.Settings(model="demo"), supervisor=lambda: Late(runtime))
async def main():
    async with app.run_test() as pilot:
        await scripted.Stage(app, pilot, runtime).ready()
asyncio.run(main())
print(frames)
"""
    done = run(body)
    assert done.stdout.strip() == "[True]", done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_killed_ui_restores_the_terminal_and_closes_the_runtime(number: signal.Signals, tmp_path: Path) -> None:
    import termios

    mark = tmp_path / "closed"
    body = f"""
{MARKING.format(mark=str(mark))}
import termios
pathlib.Path({str(tmp_path / "before")!r}).write_text(str(termios.tcgetattr(0)[3]))
runtime = scripted.Runtime()
scripted.ChatApp(scripted.Settings(model="demo"), supervisor=lambda: Marking(runtime)).run()
"""
    with in_terminal(body) as terminal:
        terminal.process.send_signal(number)
        terminal.ended()
        assert mark.exists()
        assert terminal.seen.rstrip().rfind("\x1b[?1049l") > terminal.seen.rfind("\x1b[?1049h")
        assert str(termios.tcgetattr(terminal.follower)[3]) == (tmp_path / "before").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("controlling", [True, False], ids=["with SIGHUP", "without"])
def test_a_closed_terminal_ends_the_ui(controlling: bool, tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    body = f"""
{MARKING.format(mark=str(mark))}
import fcntl, os, termios
if {controlling}:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import app.tui, app.tui.app
make = lambda settings, history: scripted.ChatApp(settings, supervisor=lambda: Marking(scripted.Runtime()))
app.tui.app.ChatApp = make
app.tui.run(scripted.Settings(model="demo"))
"""
    with in_terminal(body) as terminal:
        assert terminal.seen.count("Ask anything") < 20, "it paints again and again"
        terminal.hang_up()
        assert terminal.process.wait(60) == 129
    assert mark.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP], ids=["SIGTSTP", "SIGSTOP"])
def test_all_of_the_screen_is_drawn_after_a_stop(number: signal.Signals) -> None:
    import fcntl
    import struct
    import termios

    with in_terminal("scripted.make_app(scripted.Runtime()).run()") as terminal:
        for columns in (80, 100):  # also in a terminal whose size changed meanwhile
            terminal.process.send_signal(number)
            os.waitpid(terminal.process.pid, os.WUNTRACED)
            terminal.quiet()
            fcntl.ioctl(terminal.leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            terminal.process.send_signal(signal.SIGCONT)
            terminal.until("lowbit-chat", "Ask anything.", "send", "F1")  # header, chat, composer, keys
            terminal.type("x")
            terminal.until("x")
