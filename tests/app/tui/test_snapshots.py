"""Snapshots of the terminal UI, at three sizes and in two themes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Markdown, OptionList

from app.conversation import Extras, Passage, Source
from app.tui.messages import QuantizeAsked
from app.tui.screens import chat_dialogs as attach
from app.tui.widgets.message_view import MessageView
from runtime.wire.requests import QuantizeRequest
from tests.app.tui.kept import keep_chats
from tests.grid import grid

SIZES = [(120, 40), (80, 24), (40, 15)]
ANSWER = """Because a channel with a **large activation** multiplies its `weight error`:

1. few channels are large
2. they change from token to token 日本語 🙂

```python
def error(w, x):
    return (w - quantize(w)) @ x
```

| bits | loss |
|---|---|
| 3 | 5.1 |
| 4 | 4.8 |
"""

Look = tuple[tuple[int, int], str]
LOOKS: list[Look] = [(size, theme) for theme in ("dark", "light") for size in SIZES]
in_every_look = pytest.mark.parametrize(
    "look", grid(LOOKS, ()), ids=lambda look: f"{look[0][0]}x{look[0][1]}-{look[1]}"
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Chats that were had before, long ago."""
    questions = ("Why is the sky blue?", "A trip to Porto 日本語", "git review of the new cache")
    days = [datetime(2024, 5, day, 10, 42, tzinfo=UTC) for day in (3, 2, 1)]
    return keep_chats(tmp_path / "history.db", [(question, "Because.") for question in questions], begun=days)


class Play:
    """Acts on the application before its picture is taken."""

    def __init__(
        self,
        app: Any,
        *,
        keys: tuple[str, ...] = (),
        prompt: str | None = None,
        shown: Callable[[], object] = bool,
        then: tuple[str, ...] = (),
    ) -> None:
        self.app = app
        self.keys = keys
        self.prompt = prompt
        self.shown = shown
        self.then = then

    async def __call__(self, pilot: Any) -> None:
        session = self.app.session
        await self.until(pilot, lambda: self.app.chat.query("Composer"))
        self.app.chat.composer.cursor_blink = False
        await self.until(pilot, lambda: session.ready and not session.working)
        if self.prompt is not None:
            self.app.chat.composer.load_text(self.prompt)
            await pilot.press("enter")
            await self.until(pilot, lambda: session.conversation.head is not None)
            last = session.conversation.head
            await self.until(pilot, lambda: session.conversation[last].state != "streaming" and not self.app.chat.busy)
            await self.until(pilot, lambda: session.ready and not session.working)
        self.app.clear_notifications()
        recent = session.recent
        recent.hold = lambda _bytes: None
        recent.speeds.clear()
        recent.speeds.extend([31.0, 44.0, 52.0, 57.5, 58.0, 57.0, 58.5, 41.0, 58.0, 58.1])
        recent.memory.clear()
        recent.memory.extend([600_000_000, 700_000_000, 812_000_000, 812_000_000])
        await pilot.press(*self.keys)
        if self.shown is not bool:
            await self.until(pilot, self.shown)
        await pilot.press(*self.then)
        await self.still(pilot)
        for area in self.app.screen.query("TextArea"):
            area.cursor_blink = False
        for area in self.app.screen.query("Input"):
            area.cursor_blink = False
            area._cursor_visible = True

    async def still(self, pilot: Any) -> None:
        """Wait until the screen has been the same for a quarter of a second; a clock on it may never let it be."""
        pictures: list[str] = []
        for _ in range(40):
            await pilot._wait_for_screen()
            await pilot.pause(0.05)
            screen = self.app.screen
            strips = screen._compositor.render_strips(screen.size)
            pictures = [*pictures[-4:], repr(strips)]
            if len(pictures) == 5 and len(set(pictures)) == 1:
                return

    @staticmethod
    async def until(pilot: Any, predicate: Callable[[], object]) -> None:
        for _ in range(1000):
            if predicate():
                return
            await pilot.pause(0.01)
        raise AssertionError("waited in vain")


def offers(app: Any) -> Callable[[], object]:
    """Whether the models that can be fetched are in the table."""
    return lambda: app.screen.query("ModelTable") and app.screen.query_one("ModelTable").row_count > 2


def table_full(app: Any) -> bool:
    """Whether the table of tools shows both servers."""
    return any(table.row_count == 8 for table in app.screen.query("ToolTable"))


@in_every_look
def test_empty(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app))


@in_every_look
def test_answer(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    runtime.answers = [ANSWER]
    app = app_of(runtime, theme=look[1])
    play = Play(app, prompt="Why do activation outliers matter?\n(in short, please)")
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_failed_answer(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    runtime.fail_with = "prompt and answer do not fit the context of 8192 tokens"
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, prompt="Go"))


@in_every_look
def test_models(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, keys=("f2",), shown=offers(app)))


@in_every_look
def test_quantize_dialog(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    play = Play(app, keys=("f2",), shown=offers(app), then=("q", "x", "enter"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_settings(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, keys=("f3",)))


@in_every_look
def test_settings_with_a_custom_budget_while_tuning(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    runtime.tune_delay_s = 600
    app = app_of(runtime, theme=look[1])
    keys = ("f3", "right", "right", "right", "enter", *"7.5", "enter")
    assert snap_compare(
        app,
        terminal_size=look[0],
        run_before=Play(app, keys=keys, shown=lambda: app.session.job.message == "timing qkv"),
    )


@in_every_look
def test_device(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    play = Play(app, prompt="Go", keys=("f4",), shown=lambda: app.screen.query("KneeChart"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_device_curves(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    play = Play(app, keys=("f4", "end"), shown=lambda: app.screen.query("KneeChart"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_this_chat(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, keys=("f5",)))


@in_every_look
def test_presets(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, keys=("f8", "down")))


@in_every_look
def test_tokens(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    runtime.answers = ["One two three four five six seven eight nine ten."]
    app = app_of(runtime, theme=look[1])
    play = Play(app, prompt="Count", keys=("f7",), shown=lambda: app.screen.query("TokenText"), then=("right", "right"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_chats(snap_compare: Any, app_of: Any, runtime: Any, look: Look, kept: Path) -> None:
    app = app_of(runtime, theme=look[1], kept=kept)
    wide = look[0][0] >= 100  # the chats are beside the messages then
    play = Play(app, keys=("ctrl+b",), shown=lambda: wide or any(t.row_count for t in app.screen.query("ChatTable")))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_tools(snap_compare: Any, app_of: Any, runtime: Any, look: Look, served: Any) -> None:
    served("good", "lies")
    app = app_of(runtime, theme=look[1])

    def settled() -> bool:
        box = app.session.tools.box
        return box is not None and all(one.state in ("ready", "failed") for one in box.servers) and table_full(app)

    play = Play(app, keys=("ctrl+l",), shown=settled, then=("down",))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_a_call_is_asked_for(snap_compare: Any, app_of: Any, runtime: Any, look: Look, served: Any) -> None:
    served("good")
    runtime.answers = ['Let me see.\nCALL echo {"text": "hello"}']
    app = app_of(runtime, theme=look[1])

    def asked() -> bool:
        said, asks = app.chat.query(Markdown), bool(app.screen.query("#ask-arguments"))
        told = any("waiting for your permission" in view._live for view in app.chat.query(MessageView))
        return asks and told and bool(said) and said.last().source.strip() == "Let me see."

    play = Play(app, keys=(*"Go", "enter"), shown=asked)
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_keys(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])
    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, keys=("f1",)))


@in_every_look
def test_setting_up_a_model(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    app = app_of(runtime, theme=look[1])

    def stopped() -> bool:
        if runtime.named("quantize") and app.session.working:
            app.run_worker(app.session.stop_work())
        return app.session.job is not None and app.session.job.outcome == "stopped"

    def begin() -> bool:
        if not runtime.named("quantize"):
            runtime.load_delay_s = 600
            app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        return stopped()

    assert snap_compare(app, terminal_size=look[0], run_before=Play(app, shown=begin))


@in_every_look
def test_attaching(snap_compare: Any, app_of: Any, runtime: Any, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["‥/", "papers/", "src/", "alice.md", "contract.docx", "minutes.pdf", "notes 日本語.txt"]
    monkeypatch.setattr(attach, "names", lambda _text: listed)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/you"))
    app = app_of(runtime, theme=look[1])
    app.session.conversation.extras = Extras(sources=[Source(path="/home/you/book.md", name="book.md", tokens=36_000)])

    def shown() -> bool:
        names = app.screen.query("#attach-names").results(OptionList)
        return any(one.option_count == len(listed) for one in names)

    play = Play(app, keys=("ctrl+o",), shown=shown, then=("down", "down"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)


@in_every_look
def test_passages(snap_compare: Any, app_of: Any, runtime: Any, look: Look) -> None:
    runtime.answers = ["Osgood keeps the lighthouse."]
    app = app_of(runtime, theme=look[1])
    conversation = app.session.conversation
    conversation.extras = Extras(model="demo", sources=[Source(path="/gone/book.md", name="book.md", tokens=36_000)])
    text = "The lighthouse keeper was called Osgood.\nHe had a dog."
    found = [Passage(file="book.md", unit="line", first=12, last=13, text=text)]
    found.append(Passage(file="minutes.pdf", unit="page", first=4, last=4, text="The lamp was cleaned."))

    async def find(*_: object) -> list[Passage]:
        return found

    app.session.documents.find = find
    play = Play(app, prompt="Who keeps the lighthouse?", keys=("ctrl+up", "p"))
    assert snap_compare(app, terminal_size=look[0], run_before=play)
