"""Untrusted text on every screen: names, titles, prompts and errors are displayed literally."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.segment import Segments
from rich.traceback import Traceback

from app import paths, presets
from app.conversation import Conversation
from app.history.store import History
from app.tui.endpoint import RemoteModels
from app.tui.messages import QuantizeAsked
from runtime.errors import Problem
from runtime.wire.requests import QuantizeRequest
from tests.app.tui.conftest import make_app

Stage = Callable[..., Any]
ACTION = "[@click=app.screenshot('f','/')]x[/]"
BEGINS = "[/INST]"
"""Closes what nobody opened: whoever reads markup in it breaks off."""
ESCAPES = "\x1b]52;c;eA==\x07\x1b]0;t\x07\x9b2J\x7f\u202e\u2066\u2028\U000e0041"
"""The clipboard, the title, clearing the screen, letters that run backwards, letters that nobody sees."""
HOSTILE = f"{BEGINS} [red] {ACTION} [b \\[ [[{ESCAPES}"
OBEYED = frozenset(map(chr, [*range(0x20), *range(0x7F, 0xA0)])) | frozenset(ESCAPES[-4:])


def looked_at(s: Any, where: str) -> None:
    """Nothing that the terminal would obey, and no link to an action but the program's own."""
    for strip in s.app.screen._compositor.render_strips():
        for text, style, _ in strip:
            assert not OBEYED & set(text), f"{where}: {text!r}"
            if style is not None:
                assert "screenshot" not in str(style.meta.get("@click")), f"{where}: {text!r} can be clicked"
                assert style.link is None, f"{where}: {text!r} leads elsewhere"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A chat of before with a hostile title, prompt, answer and model."""
    history = History(tmp_path / "history.db")
    conversation = Conversation(lambda: datetime(2024, 5, 3, 10, 42, tzinfo=UTC))
    conversation.add("user", HOSTILE, parent=None)
    conversation.add("assistant", HOSTILE, parent=conversation.head, model=HOSTILE)
    path = conversation.path()
    history.record(conversation.id, conversation.head, path, title=HOSTILE, updated=path[-1].created)
    history.close()
    return tmp_path / "history.db"


@pytest.fixture
def hostile(runtime: Any) -> Any:
    """A runtime, all of whose words are."""
    runtime.entries = [replace(one, name=f"{HOSTILE}{at}", warning=HOSTILE) for at, one in enumerate(runtime.entries)]
    runtime.problems = [Problem(what=HOSTILE, fix=HOSTILE)]
    runtime.machine = {**runtime.machine, "cpu": {"name": HOSTILE}, "reason": HOSTILE}
    runtime.answers = [
        (
            f"{HOSTILE}\n\n[{ACTION}](file:///etc/passwd) <b>{ACTION}</b> &#x202e; &#x2066;\n\n- {HOSTILE}\n\n"
            f"| {ACTION} |\n|---|\n| [red]\x1b[2J |\n\n```{HOSTILE}\n{HOSTILE}\n```"
        ),
        f"<think>{HOSTILE}</think>{HOSTILE}",
    ]
    return runtime


async def test_every_screen_shows_it_as_it_stands(stage: Stage, hostile: Any, kept: Path) -> None:
    presets.save({HOSTILE: HOSTILE})
    paths.log_file().write_text(HOSTILE)
    async with stage(hostile, size=(99, 40), model=f"{HOSTILE}0", system_prompt=HOSTILE, kept=kept) as s:

        async def pressed(*keys: str, shows: str) -> None:
            await s.pilot.press(*keys)
            await s.shows(shows)
            await s.settled()
            await s.shows(BEGINS)
            looked_at(s, shows)

        await s.say(HOSTILE)
        await pressed("ctrl+up", "d", shows="error compensation")
        hostile.fail_with = HOSTILE
        await s.say("go on")
        await s.shows("retry")
        looked_at(s, "an answer that failed")
        s.composer.load_text(HOSTILE)
        await s.settled()
        looked_at(s, "the composer")
        await pressed("f2", shows="Qwen3")
        await pressed("escape", "f4", shows="41.3 GB/s")
        await pressed("escape", "f6", shows="current runtime")
        await pressed("escape", "f5", shows="For this chat only")
        await pressed("escape", "f8", shows="N new")
        await pressed("escape", "f7", shows="1 of")
        await pressed("escape", "f3", shows="Quality and speed")
        await pressed("escape", "ctrl+b", shows="3 May 2024")
        await pressed("down", "r", shows="Chat title")
        await s.pilot.press("escape", "escape")
        await s.pilot.resize_terminal(130, 40)
        await pressed("ctrl+b", shows="Older")


async def test_notices_dialogs_and_work_show_it_as_it_stands(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 30), notices=True) as s:
        s.app.notify(HOSTILE, title=HOSTILE)
        s.app.chat.notify(HOSTILE, markup=True)
        await s.shows(BEGINS)
        looked_at(s, "notices")
        s.app.clear_notifications()
        await s.hides(BEGINS)
        s.app.session.note(s.app.session.conversation, settings={"preset": HOSTILE, "system_prompt": HOSTILE})
        s.app.chat.show_session()
        await s.shows(BEGINS)
        looked_at(s, "above the composer")
        s.app.push_screen(RemoteModels([HOSTILE, "demo", "de\u200dmo"], HOSTILE, HOSTILE))
        await s.shows(f"Models of {BEGINS}", "de\ufffdmo")
        looked_at(s, "the models of a server")
        await s.pilot.press("escape")
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source=f"owner/{HOSTILE}")))
        await s.shows("▸ quantize")
        looked_at(s, "work")
        failed = replace(s.app.session.job, message=HOSTILE, outcome="failed", error=HOSTILE)
        s.app.session._work._tell(failed)
        await s.shows(f"failed: {BEGINS}")
        looked_at(s, "work that failed")


def test_a_program_that_breaks_off_writes_no_commands(runtime: Any) -> None:
    app = make_app(runtime)
    app.error_console.file = written = io.StringIO()
    try:
        raise ValueError(f"it is {ESCAPES}")
    except ValueError:
        app.error_console.print(Segments(app.console.render(Traceback(show_locals=True))))
    shown = written.getvalue()
    assert "it is ␛]52" in shown
    assert OBEYED & set(shown) == {"\n"}
